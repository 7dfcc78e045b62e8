"""Recipe of the demo model: the tasks, texts and training that made antiphon/demo.

What it is not: part of the server.  Nothing under ``antiphon`` imports it; it is
run by hand (``python -m infra.demo_model.train``) when the demo is rebuilt.
"""
