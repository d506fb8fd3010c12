"""The HTTP server: stage files, request queue, lanes of ranks.

`stage` is the file, `setup` what follows from it. `engine` queues and hands out, `hub` and `wire` connect it with the
ranks, `worker` and `runner` are what a rank does. `app` and the `routes_*` are HTTP. Nothing but `worker` and `runner`
needs torch.
"""
