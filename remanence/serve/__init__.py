"""The parts of a server in which every user has a memory of their own. The HTTP interface is not built yet.

`engine` reads texts and generates answers for many sessions together. `memories` keeps each memory as a chain of
immutable versions: states in files, and their order in the SQLite file of `database`.
"""
