"""A broker that lets nobody in without a sign-in and denies what no ACL allows, and the certificates for it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import ipaddress
import secrets
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from aiokafka.protocol.admin import CreateAclsRequest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from cli.acl import ROLES, commands
from infra import ports
from infra.broker import HOST, EmbeddedKafka
from infra.kafka import make_admin
from infra.settings import KafkaSettings

ADMIN = "admin"
LIFETIME = dt.timedelta(days=1)
PLAIN, SCRAM = "PLAIN", "SCRAM-SHA-512"
PLAIN_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SCRAM_LOGIN = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
# The protocol's numbers for what `kafka-acls.sh` names
_KINDS = {"topic": 2, "group": 3, "cluster": 4}
_OPERATIONS = {
    "Read": 3,
    "Write": 4,
    "Create": 5,
    "Alter": 7,
    "Describe": 8,
    "DescribeConfigs": 10,
    "AlterConfigs": 11,
    "IdempotentWrite": 12,
}
_LITERAL, _PREFIXED, _ALLOW = 3, 4, 3


class Authority:
    """A certificate authority that was made up for one test run. Its files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "test authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _common_name(name)
        self._certificate = self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=None))
        self.file = folder / "ca.pem"
        self.file.write_bytes(self._certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str) -> tuple[Path, Path]:
        """The files of a certificate and of its key, for `name` at this machine's loopback address."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(
            _common_name(name), key, x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(HOST))])
        )
        certfile, keyfile = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certfile.write_bytes(certificate.public_bytes(Encoding.PEM))
        keyfile.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return certfile, keyfile

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - LIFETIME)
            .not_valid_after(now + LIFETIME)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        )
        return builder.sign(self._key, hashes.SHA256())


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


class _Broker(EmbeddedKafka):
    """A broker that knows users by SCRAM from its first start."""

    scram_users: Mapping[str, str] = MappingProxyType({})

    def _format(self, java: list[str], properties: Path, *more: str) -> None:
        for user, password in self.scram_users.items():
            more += ("--add-scram", f"{SCRAM}=[name={user},password={password}]")
        super()._format(java, properties, *more)


@dataclass
class SecuredKafka:
    """The broker's two doors: `port` takes a user and a password over TLS, `mutual_port` a client's certificate.

    Every role of `headrace topics acl` is a user, and so are the direct producers of `tenants`.
    """

    folder: Path
    tenants: tuple[str, ...]
    port: int = field(default_factory=ports.free_port)
    mutual_port: int = field(default_factory=ports.free_port)

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder / "certificates")
        users = [f"headrace-{role.name}" for role in ROLES] + [f"headrace-tenant-{name}" for name in self.tenants]
        self.passwords = {user: secrets.token_hex(16) for user in (ADMIN, *users)}
        self.broker = _Broker(self.folder / "kafka", self.port, overrides=self._properties())
        self.broker.scram_users = self.passwords

    def settings(self, user: str, mechanism: str = SCRAM) -> KafkaSettings:
        """How this user signs in with its password; `user` is a role's name, or `admin`."""
        user = user if user == ADMIN else f"headrace-{user}"
        return KafkaSettings(
            f"{HOST}:{self.port}", "SASL_SSL", mechanism, user, self.passwords[user], str(self.authority.file)
        )

    def mutual(self, role: str) -> KafkaSettings:
        """How this role signs in with a certificate."""
        certfile, keyfile = self.authority.issue(f"headrace-{role}")
        return KafkaSettings(
            f"{HOST}:{self.mutual_port}",
            "SSL",
            ssl_cafile=str(self.authority.file),
            ssl_certfile=str(certfile),
            ssl_keyfile=str(keyfile),
        )

    async def allow(self) -> int:
        """Applies what `headrace topics acl` prints, as `kafka-acls.sh` would; the number of commands."""
        lines = [line for line in commands(f"{HOST}:{self.port}", self.tenants) if not line.startswith("#")]
        admin = make_admin(self.settings(ADMIN))
        await admin.start()
        try:
            for line in lines:
                for request in _requests(line):
                    answer = await admin._send_to_controller(request)
                    assert [code for code, _ in answer.creation_responses] == [0], (line, answer)
        finally:
            await admin.close()
        return len(lines)

    def _properties(self) -> dict[str, str]:
        certfile, keyfile = self.authority.issue("broker")
        keystore = self.folder / "certificates" / "broker.keystore.pem"
        keystore.write_bytes(keyfile.read_bytes() + certfile.read_bytes())
        controller_port = ports.free_port()
        doors = f"SECURED://{HOST}:{self.port},MUTUAL://{HOST}:{self.mutual_port}"
        users = " ".join(f'user_{user}="{password}"' for user, password in self.passwords.items())
        login = f'{PLAIN_LOGIN} username="{ADMIN}" password="{self.passwords[ADMIN]}" {users};'
        return {
            "listeners": f"{doors},CONTROLLER://{HOST}:{controller_port}",
            "advertised.listeners": doors,
            "controller.quorum.voters": f"1@{HOST}:{controller_port}",
            "listener.security.protocol.map": "SECURED:SASL_SSL,MUTUAL:SSL,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "SECURED",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.secured.sasl.enabled.mechanisms": f"{PLAIN},{SCRAM}",
            "listener.name.secured.scram-sha-512.sasl.jaas.config": SCRAM_LOGIN,
            "listener.name.secured.plain.sasl.jaas.config": login,
            "listener.name.mutual.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keystore),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.file),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            # Nobody is anonymous on either door; on the controller's listener the broker itself is.
            "super.users": f"User:{ADMIN};User:ANONYMOUS",
        }


def _requests(line: str) -> Iterable[CreateAclsRequest]:
    """One printed command as requests; an option that isn't known here fails."""
    words = shlex.split(line)
    assert words[0] == "kafka-acls.sh"
    assert words[3] == "--add"
    operations, kind, name, pattern, principal = [], "", "", _LITERAL, ""
    rest = iter(words[4:])
    for option in rest:
        match option:
            case "--allow-principal":
                principal = next(rest)
            case "--operation":
                operations.append(_OPERATIONS[next(rest)])
            case "--topic" | "--group":
                kind, name = option.removeprefix("--"), next(rest)
            case "--cluster":
                kind, name = "cluster", "kafka-cluster"
            case "--resource-pattern-type":
                assert next(rest) == "prefixed"
                pattern = _PREFIXED
            case _:
                raise AssertionError(option)
    for operation in operations:
        yield CreateAclsRequest(_KINDS[kind], name, pattern, principal, "*", operation, _ALLOW)


def with_password(settings: KafkaSettings, password: str) -> KafkaSettings:
    """The same user with another password."""
    return dataclasses.replace(settings, sasl_password=password)
