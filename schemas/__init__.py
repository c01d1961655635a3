"""The language of Headrace: every event, topic and reason, and how they are written.

Owns: the events (`events`), their Avro form (`avro_form`, `avro/`), the wire codec (`codec`), the topics (`topics`), the closed list of
reasons (`reasons`), the error root (`errors`) and request ids (`ids`). It runs nothing and touches nothing outside; every other room
imports it, and it imports only the standard library, fastavro and avro.
"""
