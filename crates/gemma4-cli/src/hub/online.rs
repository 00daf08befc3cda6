//! Models of the Hub, which are downloaded if the cache lacks them.

use super::download::Hub;
use super::gguf_files::gigabytes;
use super::name::Name;
use super::{GgufFiles, Reason, Wanted, gguf_of};
use crate::{Error, terminal::note};
use std::path::{Path, PathBuf};

/// Downloads the model's files that the cache lacks, and prints their size first. A checkpoint in safetensors comes
/// before GGUF files. `cached` are the GGUF files in the cache, which are used if the Hub has no such checkpoint or
/// does not answer. `folder` is the model's folder in the cache.
pub(super) fn found(
    hub: &Hub,
    name: Name<'_>,
    folder: &Path,
    cached: Option<&GgufFiles>,
    wanted: &mut Wanted<'_>,
) -> Result<PathBuf, Error> {
    note(format_args!(
        "note: {} is neither a local folder nor whole in the Hub's cache; asking {}",
        name.model,
        hub.endpoint()
    ));
    let repository = match (hub.repository(name.model), cached, &wanted) {
        (Ok(repository), ..) => repository,
        (Err(reason), Some(cached), Wanted::Any(_)) => {
            note(format_args!(
                "note: {reason}; using the GGUF files in the Hub's cache"
            ));
            return cached.choose(name, wanted);
        }
        (Err(reason), ..) => {
            return Err(Reason(format!(
                "no such local folder, and {reason}. `hf download {}` gets a model of the Hub, too",
                name.model
            ))
            .into());
        }
    };
    let sizes = repository.sizes();
    let checkpoint = repository.checkpoint().filter(|_| name.file.is_none());
    if let (None, Some(cached), Wanted::Any(_)) = (&checkpoint, cached, &wanted)
        && let Ok(found) = cached.choose(name, wanted)
    {
        return Ok(found);
    }
    let candidate = match checkpoint {
        Some(_) => None,
        None => Some(gguf_of(&sizes, name, wanted)?),
    };
    let paths = match (&candidate, &checkpoint) {
        (Some(candidate), _) => candidate.files.iter().map(String::as_str).collect(),
        (None, checkpoint) => checkpoint.clone().unwrap_or_default(),
    };
    let files = repository.files(paths).map_err(Reason)?;
    let missing = files
        .iter()
        .filter(|file| !folder.join("blobs").join(&file.etag).exists());
    let missing: Vec<u64> = missing.map(|file| file.bytes).collect();
    let bytes = missing.iter().copied().fold(0, u64::saturating_add);
    note(format_args!(
        "note: downloading {} from {} to {}: {} in {} files. The licence on the model's page holds.",
        name.model,
        hub.endpoint(),
        folder.display(),
        gigabytes(bytes),
        missing.len()
    ));
    let bar = crate::model::progress_bar()?;
    let snapshot = hub.fetch(&repository, &files, folder, &bar);
    bar.finish_and_clear();
    let snapshot = snapshot.map_err(Reason)?;
    Ok(match candidate {
        Some(candidate) => snapshot.join(candidate.path()),
        None => snapshot,
    })
}
