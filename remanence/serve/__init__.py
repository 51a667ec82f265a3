"""A server in which every user has a memory of their own.

`engine` reads texts and generates answers for many sessions together, as rows of a `batch`. `memories` keeps each
memory as a chain of immutable versions: states in files of a `store`, and their order in the tables of `database`.
`service` answers requests: it finds what a request continues and what is still to be read, and commits the new version.
`access` has API keys and limits.

The rest is HTTP, and needs the extra `serve`: `app` puts the routes of `openai` and `memory_routes` together, with the
`schemas` of requests; `gate` checks and logs every request; `streams` sends events; `errors` and `metrics`; `server`
runs it all in one process, and `ray` in several. `page` is the web page.
"""
