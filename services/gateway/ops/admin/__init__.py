"""Endpoints for operators, under `/admin`. With API keys they need the scope `admin`.

engines    `/admin/engines/{id}`: takes an engine out of service and back into it
models     `/admin/models`: sets, rolls back and shadows the version of a model
"""
