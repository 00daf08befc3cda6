//! The server's web page, a single file that loads no further files.

use axum::response::Html;

/// Returns the page.
pub(crate) async fn page() -> Html<&'static str> {
    Html(include_str!("page.html"))
}
