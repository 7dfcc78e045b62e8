"""What benchmarks share.

| module            | contents                                                       |
|-------------------|----------------------------------------------------------------|
| `serving`         | starts, pauses, inspects and stops servers                     |
| `loads`           | the standard loads and their prompts                           |
| `measure`         | measures one load on one server                                |
| `sample`          | the result of one measured load                                |
| `report`          | medians, ratios and tables of samples                          |
| `output`          | writes figures as JSON                                         |
| `emulated_engine` | an engine service that computes nothing                        |
"""
