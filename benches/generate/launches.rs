//! Records the kernels that a closure launches, and the device time of each kernel. The recording does not make the
//! host wait for the device.

use serde::Serialize;

/// The kernel launches that were recorded.
#[derive(Default, Serialize)]
pub struct Launches {
    /// The number of launches.
    pub count: usize,
    /// The sum of the device times of all launches that were timed.
    pub milliseconds: f64,
    /// The kernels, sorted by decreasing device time.
    pub kernels: Vec<Kernel>,
}

#[derive(Serialize)]
pub struct Kernel {
    pub name: String,
    pub count: usize,
    pub milliseconds: f64,
}

impl std::fmt::Display for Launches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const MOST: usize = 14;
        write!(f, "{} launches, {:.3} ms", self.count, self.milliseconds)?;
        for kernel in self.kernels.iter().take(MOST) {
            write!(
                f,
                "\n        {:>9.3} ms {:>5} {}",
                kernel.milliseconds, kernel.count, kernel.name
            )?;
        }
        Ok(())
    }
}

/// Runs `work` and records nothing, because a build without CubeCL launches no kernels. The second result is always `None`.
#[cfg(not(feature = "cube"))]
pub fn observe<O>(work: impl FnOnce() -> O) -> (O, Option<Launches>) {
    (work(), None)
}

#[cfg(feature = "cube")]
pub use observed::observe;

#[cfg(feature = "cube")]
mod observed {
    use super::{Kernel, Launches};
    use burn::backend::read_sync;
    use cubecl::{
        config::{TypeNameFormatLevel, type_name_format},
        logging::{
            Duration, LaunchObservation, LaunchObserver, ProfileDuration, TimingMethod,
            TimingRequest,
        },
    };
    use std::{
        collections::HashMap,
        sync::{Arc, Mutex, PoisonError},
    };

    #[derive(Default)]
    struct Watcher(Mutex<Seen>);

    #[derive(Default)]
    struct Seen {
        launched: Vec<&'static str>,
        unread: Vec<(&'static str, ProfileDuration)>,
        read: Vec<(&'static str, f64)>,
    }

    impl Watcher {
        fn with(&self, note: impl FnOnce(&mut Seen)) {
            note(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    impl LaunchObserver for Watcher {
        fn launched(&self, kernel: &'static str) {
            self.with(|seen| seen.launched.push(kernel));
        }

        fn timing(&self) -> TimingRequest {
            TimingRequest::Deferred
        }

        fn profiled(&self, kernel: &'static str, profile: ProfileDuration) {
            self.with(|seen| seen.unread.push((kernel, profile)));
        }

        fn timed(&self, kernel: &'static str, duration: Duration, _method: TimingMethod) {
            self.with(|seen| seen.read.push((kernel, duration.as_secs_f64())));
        }
    }

    /// Runs `work`, and returns its result and the recorded launches. The launches are `None` if `work` launched no kernel.
    pub fn observe<O>(work: impl FnOnce() -> O) -> (O, Option<Launches>) {
        let watcher = Arc::new(Watcher::default());
        let observation = LaunchObservation::new(watcher.clone());
        let output = work();
        drop(observation);

        let mut seen = Seen::default();
        watcher.with(|found| std::mem::swap(found, &mut seen));
        let mut kernels: HashMap<&str, (usize, f64)> = HashMap::new();
        for kernel in &seen.launched {
            kernels.entry(kernel).or_default().0 += 1;
        }
        let resolved = seen.unread.into_iter().filter_map(|(kernel, profile)| {
            let ticks = read_sync(profile.resolve())?;
            Some((kernel, ticks.duration().as_secs_f64()))
        });
        for (kernel, seconds) in seen.read.into_iter().chain(resolved) {
            kernels.entry(kernel).or_default().1 += seconds * 1e3;
        }
        let mut kernels: Vec<Kernel> = kernels
            .into_iter()
            .map(|(name, (count, milliseconds))| Kernel {
                name: type_name_format(name, TypeNameFormatLevel::Short),
                count,
                milliseconds,
            })
            .collect();
        kernels.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        let launches = Launches {
            count: seen.launched.len(),
            milliseconds: kernels.iter().map(|kernel| kernel.milliseconds).sum(),
            kernels,
        };
        (output, (launches.count > 0).then_some(launches))
    }
}
