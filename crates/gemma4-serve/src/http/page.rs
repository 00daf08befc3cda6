//! The web page, one file that works without other servers.

use axum::response::Html;

/// Returns the page.
pub(crate) async fn page() -> Html<&'static str> {
    Html(include_str!("page.html"))
}
