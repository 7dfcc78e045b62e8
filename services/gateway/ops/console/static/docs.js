// Shows openapi.json with Swagger UI, which would otherwise ask a server of its makers whether the document is valid.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#docs", validatorUrl: null });
