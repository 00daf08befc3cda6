//! Selection on devices whose matrix units are checked before their first use.

use super::driver::{Identity, identity};
use super::run::check;
use super::verdict_file::VerdictFile;
use crate::problem::AttentionProblem;
use crate::select::Selection;
use crate::types::device::DeviceProfile;
use crate::types::fragment_verdict::{FragmentVerdict, TileCheck};
use crate::types::refusal::Refusal;
use crate::types::request::Layouts;
use burn_cubecl::CubeDevice;
use cubecl::client::Client;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Selects a kernel by `select`. If the selection needs a verdict of the self-check, runs the check and selects again.
/// Returns the device's profile with all verdicts, and the selection.
///
/// A check launches kernels and reads their results back. Other threads that need a verdict wait for the check.
pub(crate) fn select_checked<K>(
    device: &CubeDevice,
    client: &Client,
    problem: &AttentionProblem,
    layouts: Layouts,
    select: impl Fn(&DeviceProfile) -> Selection<K>,
) -> (Arc<DeviceProfile>, Selection<K>) {
    let mut profile = DeviceProfile::of_cube(device, || client.clone());
    loop {
        let selection = select(&profile);
        let unchecked = selection.refusals.iter().find_map(|(_, refusal)| {
            let Refusal::Unchecked(check) = refusal else {
                return None;
            };
            Some(check.as_ref().clone())
        });
        match unchecked {
            Some(tiles) => profile = obtain_verdict(device, client, problem, layouts, tiles),
            None => return (profile, selection),
        }
    }
}

/// Obtains the verdict on some tiles from this process, from the file of verdicts, or from a check. Returns the
/// device's profile with the verdict.
fn obtain_verdict(
    device: &CubeDevice,
    client: &Client,
    problem: &AttentionProblem,
    layouts: Layouts,
    tiles: TileCheck,
) -> Arc<DeviceProfile> {
    /// The identities of the devices, behind the lock of the check. A check never needs a thread that can wait for this
    /// lock: the check launches on CubeCL's own thread of the device, and attention calls run on the callers' threads
    /// and on Burn's fusion thread.
    static CHECKING: LazyLock<Mutex<HashMap<CubeDevice, Identity>>> = LazyLock::new(Mutex::default);
    let mut identities = CHECKING.lock().unwrap_or_else(PoisonError::into_inner);
    let profile = DeviceProfile::of_cube(device, || client.clone());
    let verdicts = profile.fragments.verdicts.as_ref();
    if verdicts.is_some_and(|verdicts| verdicts.of(&tiles).is_some()) {
        return profile;
    }
    // The identity needs a list of the machine's adapters, so it is kept.
    let identity = identities
        .entry(device.clone())
        .or_insert_with(|| identity(&profile.name, client));
    let file = VerdictFile::of(identity);
    // A capture records launches instead of running them. Without a verdict on disk, the refusal holds until the
    // process ends, so that the forward and the backward of a captured step use the same engine.
    if client.is_capturing() {
        let kept = file
            .kept(&tiles)
            .map(|(verdict, file)| (verdict, Some(file)));
        let (verdict, file) = kept.unwrap_or_else(|| {
            let reason = "its matrix units cannot be checked during the capture of a graph, where this process first \
                          needed these tiles; `explain` checks them before a capture";
            (FragmentVerdict::Refused(reason.into()), None)
        });
        return DeviceProfile::with_verdict(device, client, (tiles, verdict), file);
    }
    log::debug!(
        "attention: {} needs a verdict on its matrix units: {tiles}",
        profile.name
    );
    let (verdict, file) = file.verdict(&tiles, || {
        check(device, client, &profile, problem, layouts, &tiles)
    });
    match &verdict {
        FragmentVerdict::Passed { .. } => log::debug!("attention: cmma, {tiles}: {verdict}"),
        FragmentVerdict::Refused(_) => log::warn!("attention: cmma, {tiles}: {verdict}"),
    }
    DeviceProfile::with_verdict(device, client, (tiles, verdict), file)
}
