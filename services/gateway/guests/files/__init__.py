"""Files that clients upload, `/v1/files`: the input and output of batches, and images.

| module      | what it does                                                            |
|-------------|-------------------------------------------------------------------------|
| `api`       | uploads, lists, retrieves and deletes files                             |
| `multipart` | reads the form in which a file is uploaded, piece by piece              |
| `store`     | the files that a call's key may see                                     |
| `directory` | the files of all keys on the disk, and the room that is left for a key  |
| `writer`    | writes the data of one file                                             |
| `records`   | reads small JSON files: descriptions of files, records of batches       |
| `clock`     | the wall clock, and whether it can be trusted                           |
| `disk`      | work on the disk in threads                                             |
| `temporary` | makes directories that do not outlive their processes for long          |
"""
