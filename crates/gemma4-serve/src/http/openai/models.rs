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

fn model(app: &App) -> Value {
    json!({
        "id": app.options.model, "object": "model", "created": app.started, "owned_by": "gemma4",
        "max_model_len": app.engine.context(),
    })
}

/// Returns a list with the server's only model.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model(&app)]}))
}

/// Returns the description of the model called `name`, or an error if the server does not have the model.
pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Response {
    let found: Result<(), RequestError> = app.check_model(&name);
    match found {
        Ok(()) => Json(model(&app)).into_response(),
        Err(error) => Form::OpenAi.response(&error),
    }
}
