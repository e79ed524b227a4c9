"""The harness behind `unimem bench`: what unimem costs, beside what one would use instead.

Data flows one way. A suite declares its cases (`suite`); `run` starts a process for each pass of a
suite, in which `worker` calls the cases; `rounds` measures, with the sides alternating; what comes
back is a `record`, and nothing but figures as they were measured. `stats` makes medians, ratios
and verdicts of it, and `tables`, `plots`, `compare` and `page` show those.
"""
