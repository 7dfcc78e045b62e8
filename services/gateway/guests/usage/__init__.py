"""Usage records that the bus keeps: one for each request, whatever happens to gateways and sinks. ADR 110.

| module     | what it does                                                                   |
|------------|--------------------------------------------------------------------------------|
| `log`      | the log on the bus: requests that run, records, positions of sinks             |
| `book`     | what a gateway tells the log of its own requests                               |
| `orphans`  | decides which requests nobody runs any more. Pure                              |
| `reaper`   | writes the records of these requests                                           |
| `delivery` | feeds a sink from the log, from one gateway at a time                          |
| `guest`    | makes these parts for a gateway                                                |
"""
