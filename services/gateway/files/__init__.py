"""Files that clients upload, `/v1/files`: the input and output of batches, and pictures.

| module      | what it does                                                     |
|-------------|------------------------------------------------------------------|
| `endpoints` | uploads, lists, retrieves and deletes files                      |
| `multipart` | reads the form in which a file is uploaded, piece by piece       |
| `store`     | keeps files in a directory                                       |
| `temporary` | makes directories that do not outlive their processes for long   |
"""
