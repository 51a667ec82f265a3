"""An HTTP server with OpenAI's API in which every user has a memory of their own (docs/serving.md).

`engine` computes the answers of many sessions together, `memories` keeps each memory as a chain of immutable versions
(files in `store`, their order in `database`), `access` has keys and limits, `app` the HTTP interface. Needs the extra
`serve`.
"""
