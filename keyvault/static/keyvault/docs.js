"use strict";

// Disable the validator badge: it would send the schema to a third-party server.
SwaggerUIBundle({
  url: document.getElementById("docs").dataset.page,
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
});
