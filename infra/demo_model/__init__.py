"""The recipe of the demo model antiphon/demo: tasks, texts and training.

It is not part of the server, and nothing under ``antiphon`` imports it. It is run by hand
(``python -m infra.demo_model.train``) to rebuild the demo model.
"""

import time

#: Monotonic seconds at which the process imported this package. That is before it imports torch, so that the duration
#: of a training includes the start-up.
STARTED = time.monotonic()
