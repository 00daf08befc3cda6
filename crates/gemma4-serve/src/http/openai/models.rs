//! The handlers of `/v1/models`.

use super::super::app::App;
use super::super::form::Form;
use crate::error::RequestError;
use axum::{
    Json,
    extract::{Path, State},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Describes the model called `name`: the server's model, or this model with an adapter.
fn model(app: &App, name: &str) -> Value {
    let base = &app.options.model;
    json!({
        "id": name, "object": "model", "created": app.started, "owned_by": "gemma4",
        "max_model_len": app.engines.context(), "parent": (name != base).then_some(base),
    })
}

/// Returns a list with the server's model, and with this model for each adapter.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let names = app.model_names();
    let models = names.iter().map(|name| model(&app, name));
    Json(json!({"object": "list", "data": models.collect::<Value>()}))
}

/// Returns the description of the model called `name`, or an error if the server does not have the model.
pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    let found: Result<_, RequestError> = app.select_adapter(&name);
    match found {
        Ok(_) => Json(model(&app, &name)).into_response(),
        Err(error) => Form::OpenAi.response(&error),
    }
}
