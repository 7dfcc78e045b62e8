"""The gateway service: it serves the OpenAI API over HTTP and runs each request on the bus with a request actor."""
