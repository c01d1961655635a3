"""The rules of Headrace, as pure functions and folds: what is known and what came, in; what follows from it, out.

Owns: what a request's stream means (`stream`), what is written of one that ended (`endings`) and what of it is left for a reader who comes
back (`resume`); which requests are well-formed (`validation`), let in, and sent where (`admission`, `placement`); how a worker group shares
its partitions (`shares`), which work a worker looks at and what it may commit (`window`), and how a request is taken over (`takeover`).
Nothing here reads a clock, draws at random, does I/O or awaits: what a rule needs to know is handed to it, and times are the records'.
"""
