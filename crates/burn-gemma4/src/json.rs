//! Parses JSON. An error names the path of the field at fault.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Parses a JSON text. An error begins with the path of the field at fault, such as `text_config.head_dim: invalid type …`.
pub(crate) fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut json).map_err(at_path)?;
    json.end().map_err(|error| error.to_string())?;
    Ok(value)
}

/// Converts a parsed JSON value. An error begins with the path of the field at fault, as in [`from_slice`].
pub(crate) fn from_value<T: DeserializeOwned>(value: &Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(at_path)
}

/// Converts the value of the field `name` as [`from_value`] does. The path in an error begins with `name`.
pub(crate) fn from_field<T: DeserializeOwned>(name: &str, value: &Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let is_inside = error.path().iter().next().is_some();
        let separator = if is_inside { "." } else { ": " };
        format!("{name}{separator}{}", at_path(error))
    })
}

fn at_path(error: serde_path_to_error::Error<serde_json::Error>) -> String {
    let is_root = error.path().iter().next().is_none();
    match is_root || error.inner().is_syntax() || error.inner().is_eof() {
        true => error.into_inner().to_string(),
        false => error.to_string(),
    }
}
