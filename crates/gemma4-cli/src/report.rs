//! Writes the reports of benchmarks.

use crate::Error;
use serde::Serialize;
use std::{
    fs,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

/// Writes a report as JSON to the file `path`.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn save(report: &impl Serialize, path: &Path) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(report)?;
    fs::write(path, text + "\n")
        .map_err(|error| format!("{} cannot be written: {error}", path.display()).into())
}

/// Returns the current time in the format 2000-12-31T23:59:59Z.
pub fn now() -> String {
    let seconds = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let (days, second) = (seconds / 86400, seconds % 86400);
    // In this computation, years begin in March, so that the leap day is the last day of a year (Howard Hinnant,
    // days_from_civil).
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}
