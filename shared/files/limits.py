"""The limits of uploaded files and batches, each with its unit and its reason. Others are in `shared/limits.py`."""

from antiphon.shared.limits import BODY_BYTES_MAX

# --- files and batches ---
FILE_BYTES_MAX = 200 * 2**20
"""Size of one uploaded file, as in OpenAI's API for batches. Files are on disk; a gateway holds a piece in memory."""
UPLOAD_BYTES_MAX = FILE_BYTES_MAX + 2**20
"""Size of the body of an upload: a file and the rest of the form."""
FILES_MAX = 4096
"""Files in the directory of files, with those that are being written. A key may have as many as it leaves to the other
keys, so one key alone has at most a half. Each upload looks at the names of all."""
FILES_BYTES_MAX = 8 * 2**30
"""Size of all files in the directory, or less on a smaller disk. A key may have as much as it leaves to the others."""
FILES_FREE_BYTES = 32 * 2**20
"""Room on the disk that uploads leave free, for the records of batches and the ends of their output files."""
FILE_STEP_BYTES = 4 * 2**20
"""A file whose size nobody has announced takes room in steps of this size: output of batches, uploads without
`Content-Length`."""
FILE_NAME_CHARS_MAX = 255
"""Characters of a file's name that are kept, the last ones. The name is only shown; it is never a path."""
FILE_TTL_MIN_S = 3600
"""Shortest time after which a client may let a file expire, in seconds, as in OpenAI's API."""
FILE_TTL_S = 30 * 24 * 3600
"""How long files are kept, in seconds, unless their clients want them to expire earlier; as in OpenAI's API."""
FILE_ABANDONED_S = 3 * 24 * 3600
"""Time without a write after which a file that is not complete is removed. This is longer than a batch runs: its output
files are written until its end."""
CLOCK_JUMP_S = 60.0
"""Difference between the times that the wall clock and the monotonic clock have measured from which the wall clock has
jumped. More than a clock is ever corrected by while it runs."""
CLOCK_STEADY_S = 3600.0
"""How long the wall clock must have run evenly, from the start of the gateway or the last jump, before anything is
deleted because it has expired. Time to put a wrong clock right."""
FORM_PARTS_MAX = 16
"""Parts of a form. An upload has four."""
FORM_HEADER_BYTES_MAX = 4096
"""Size of the headers of one part of a form: room for the longest file name in any encoding."""
FORM_FIELD_CHARS_MAX = 256
"""Characters in a field of a form that is not a file."""
FORM_EPILOGUE_BYTES_MAX = 4096
"""Bytes after the end of a form, which are ignored. Forms of known clients have two there, a line end."""
BATCH_WINDOW_S = 24 * 3600
"""Time in which a batch must be finished, in seconds: the only `completion_window` of OpenAI's API. Requests of the
batch that are not answered by then expire."""
BATCH_LINE_BYTES_MAX = BODY_BYTES_MAX + 2**16
"""Size of one line of a batch's input: the largest body, and the fields around it. A line is decoded by one call, in
which nothing else runs in the process: about 50 ms for a line of this size."""
BATCH_ANSWER_BYTES_MAX = 64 * 2**20
"""Size of one line of a batch's output. Room for 2048 vectors of 1536 numbers; a larger answer becomes an error."""
BATCH_ID_CHARS_MAX = 512
"""Characters in a `custom_id`. It is repeated in the output, and in the errors of an invalid input."""
BATCH_REQUESTS_MAX = 50_000
"""Requests in one batch, as many as in OpenAI's API."""
BATCH_LINES_MAX = 2 * BATCH_REQUESTS_MAX
"""Lines in the input of one batch, blank ones included. Bounds the work of reading it."""
BATCH_CONCURRENCY = 64
"""Places for the requests of all batches of a gateway that run at the same time. More than an engine's batch slots
gains little."""
BATCH_PLACE_BYTES = 2**20
"""A request of a batch takes one place for each begun piece of this size in its line. Bounds the memory of all of them:
64 MiB."""
BATCH_ORDINARY_S = 2 * 3600
"""Length of the last part of a batch's window, in seconds, in which the batch's requests are ordinary ones. Before it
they run in the idle lane."""
BATCHES_UNFINISHED_MAX = 64
"""Batches in the directory of files that are not finished; further ones are refused with 503. A key may have as many as
it leaves to the other keys. A gateway that runs a batch holds up to 8 MiB for the ids of its requests."""
BATCHES_MAX = 1024
"""Batches in the directory of files. With more, ended batches are removed, but not their files: always the oldest one
of the key that has most."""
BATCH_OUTPUT_BYTES_MAX = 2 * 2**30
"""Size of one output file of a batch. A batch whose answers are larger fails."""
BATCH_ERRORS_MAX = 100
"""Lines of an input file that the errors of a batch name."""
