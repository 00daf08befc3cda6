//! The speed of the cmma engine beside the unit engine.

use crate::types::fragment_verdict::FragmentVerdict;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::future::block_on;
use std::time::{Duration, Instant};

/// The number of timed runs of each engine. The shortest time counts, because other work on the device only adds time.
const RUNS: usize = 4;

/// The slowest speed, as a percentage of the unit engine's speed, at which the cmma engine serves. The difference to
/// 100 is for noise.
const LEAST_PERCENT: u32 = 95;

/// A timed computation. It returns its results, which tell whether a launch failed.
pub(super) type Computation<'a> = &'a dyn Fn() -> Vec<CubeTensor>;

/// Measures the times of two computations in turns, after one run of each that compiles its kernels.
///
/// # Errors
/// Returns the error of a launch.
pub(super) fn compare_times(
    client: &Client,
    computations: [Computation; 2],
) -> Result<[Duration; 2], String> {
    let time = |computation: Computation| {
        let start = Instant::now();
        let results = computation();
        // CubeCL keeps the error of a launch with the buffers that the launch did not write. A plain `sync` succeeds.
        let handles = results.iter().map(|result| &result.handle);
        block_on(client.sync_buffers(handles))
            .map_err(|error| format!("a timed launch failed: {error}"))?;
        Ok::<_, String>(start.elapsed())
    };
    let mut least = [Duration::MAX; 2];
    for run in 0..=RUNS {
        for (least, computation) in least.iter_mut().zip(computations) {
            let elapsed = time(computation)?;
            if run > 0 {
                *least = elapsed.min(*least);
            }
        }
    }
    Ok(least)
}

/// Returns the verdict on tiles whose results are right, by the times of the cmma engine and of the unit engine.
pub(super) fn verdict_of_times([cmma, unit]: [Duration; 2]) -> FragmentVerdict {
    let percent = 100.0 * unit.as_secs_f64() / cmma.as_secs_f64().max(1e-9);
    let percent = percent.round() as u32;
    match percent >= LEAST_PERCENT {
        true => FragmentVerdict::Passed {
            speed_percent: Some(percent),
        },
        false => FragmentVerdict::Refused(format!(
            "its matrix units are slower than the unit engine, at {percent} % of its speed"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdict_of_times_refuses_slower_units() {
        let verdict = |times: [u64; 2]| verdict_of_times(times.map(Duration::from_micros));
        let passed = |percent| FragmentVerdict::Passed {
            speed_percent: Some(percent),
        };
        assert_eq!(verdict([100, 320]), passed(320));
        assert_eq!(verdict([100, 96]), passed(96));
        let reason = "its matrix units are slower than the unit engine, at 50 % of its speed";
        assert_eq!(verdict([100, 50]), FragmentVerdict::Refused(reason.into()));
    }
}
