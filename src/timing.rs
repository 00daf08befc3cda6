//! Measures the time of work on a device.

use crate::{Dtype, Error};
use burn::backend::read_sync;
use burn::tensor::{DType, Device, ProfileOptions, Tensor, TimingMethod};
use std::time::{Duration, Instant};

/// The pause on a GPU before the launches that are timed one by one. Without the pause, earlier work may keep the GPU
/// at its power cap, where it is 3 to 5 % slower.
const REST: Duration = Duration::from_secs(1);

/// The number of ballast launches before each single launch. Ballast keeps the GPU busy while the host prepares the
/// timed launch, because an idle GPU lowers its clock. With 4, 16 and 48 ballast launches, the measured speed of the
/// backward with head dimension 256 was 437, 446 and 462 TFLOP/s.
const BALLAST: usize = 48;

/// The effort of a measurement: how often the work is launched, and a time limit.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Effort {
    /// The number of launches that are timed one by one. The median of their times is reported.
    pub launches: usize,
    /// The number of launches that are timed together, back to back.
    pub sustained: usize,
    /// The time limit of each measurement, in seconds. A measurement that would exceed the limit has fewer launches.
    pub seconds: f64,
}

/// The median time of launches that were timed one by one, and the number of these launches.
#[derive(Clone, Copy, Debug)]
pub struct Singles {
    /// The median time in seconds.
    pub median: f64,
    /// The number of launches.
    pub launches: usize,
}

/// A timer for work on one device.
pub struct Timer {
    device: Device,
    /// True if the device's own profiler measures the times, or false if the wall clock measures the times.
    on_device: bool,
    /// The tensor on which ballast runs, or `None` without ballast. Ballast is work that keeps a GPU busy while the host
    /// prepares the timed launch.
    ballast: Option<Tensor<1>>,
}

impl Timer {
    /// Creates a timer for `device`. `software` is true if a CPU runs the device's kernels.
    pub fn new(device: &Device, software: bool) -> Self {
        let floats = 64 << 20;
        let ballast =
            (!software).then(|| Tensor::<1>::zeros([floats], (device, DType::F32)).add_scalar(1.0));
        let probe = Tensor::<1>::zeros([1024], (device, DType::F32));
        let work = move || probe.add_scalar(1.0);
        let on_device = matches!(window(device, work), Ok((_, TimingMethod::Device)));
        Self {
            device: device.clone(),
            on_device,
            ballast,
        }
    }

    /// Returns the name of the clock that measures the times.
    pub fn clock(&self) -> &'static str {
        match self.on_device {
            true => "the device's clock",
            false => "the wall clock, from launch to sync",
        }
    }

    /// Times launches of `run` one by one, and returns their median time. Each launch gets what `prepare` returns. All
    /// work that `prepare` enqueues on the device is finished before the measurement begins.
    ///
    /// # Errors
    /// Returns an error if the device reports a fault.
    pub fn singles<T, O>(
        &self,
        effort: Effort,
        mut prepare: impl FnMut() -> T,
        run: impl Fn(T) -> O + Sync,
    ) -> Result<Singles, Error>
    where
        T: Send,
        O: Send + 'static,
    {
        self.warm_up(|| run(prepare()))?;
        if self.ballast.is_some() {
            self.device.sync()?;
            std::thread::sleep(REST);
        }
        let start = Instant::now();
        let mut times = Vec::new();
        while times.is_empty()
            || times.len() < effort.launches && start.elapsed().as_secs_f64() < effort.seconds
        {
            let input = prepare();
            times.push(self.once(|| run(input))?);
        }
        times.sort_by(f64::total_cmp);
        Ok(Singles {
            median: times[times.len() / 2],
            launches: times.len(),
        })
    }

    /// Measures the mean time of `run` over back-to-back launches, by the wall clock.
    ///
    /// # Errors
    /// Returns an error if the device reports a fault.
    pub fn sustained<O>(
        &self,
        effort: Effort,
        single: f64,
        mut run: impl FnMut() -> O,
    ) -> Result<f64, Error> {
        let fitting = (effort.seconds / single.max(1e-9)) as usize;
        let launches = effort.sustained.min(fitting).max(1);
        self.device.sync()?;
        let start = Instant::now();
        for _ in 0..launches {
            self.flushed(&mut run)?;
        }
        self.device.sync()?;
        Ok(start.elapsed().as_secs_f64() / launches as f64)
    }

    /// Measures the memory bandwidth of an elementwise operation over a large tensor, in bytes per second. The measured
    /// bytes are those that the operation reads and those that it writes.
    ///
    /// # Errors
    /// Returns an error if the device reports a fault.
    pub fn memory_rate(&self, dtype: Dtype, effort: Effort) -> Result<f64, Error> {
        let elements: usize = match self.ballast {
            Some(_) => 512 << 20,
            None => 16 << 20,
        };
        let wide = Tensor::<2>::zeros([elements >> 10, 1 << 10], (&self.device, dtype.burn()));
        let copy = self.singles(effort, || wide.clone(), |wide| wide.add_scalar(1.0))?;
        Ok((2 * elements * dtype.burn().size()) as f64 / copy.median)
    }

    /// Calls `run` until its kernels are compiled, memory pools are filled and clocks are raised. The warm-up lasts at least
    /// half a second. It ends when a launch takes less than 1.5 times the fastest earlier launch, or after 50 launches.
    fn warm_up<O>(&self, mut run: impl FnMut() -> O) -> Result<(), Error> {
        const ENOUGH: Duration = Duration::from_millis(500);
        const MOST: usize = 50;
        let start = Instant::now();
        let mut fastest = Duration::ZERO;
        for _ in 0..MOST {
            let launch = Instant::now();
            self.flushed(&mut run)?;
            self.device.sync()?;
            let time = launch.elapsed();
            if time < fastest * 3 / 2 && start.elapsed() > ENOUGH {
                break;
            }
            fastest = if fastest.is_zero() {
                time
            } else {
                fastest.min(time)
            };
        }
        Ok(())
    }

    /// Enqueues work on the device and flushes the queue. Without the flush, a lazy backend would collect the work until the
    /// next sync.
    fn flushed<O>(&self, run: impl FnOnce() -> O) -> Result<(), Error> {
        let output = run();
        self.device.flush()?;
        drop(output);
        Ok(())
    }

    fn once<O: Send + 'static>(&self, run: impl FnOnce() -> O + Send) -> Result<f64, Error> {
        if !self.on_device {
            self.device.sync()?;
            let start = Instant::now();
            let output = run();
            self.device.sync()?;
            let time = start.elapsed();
            drop(output);
            return Ok(time.as_secs_f64());
        }
        // On an idle device, the device's timer would start before the host has launched the timed work. The measured time
        // would then include the host's launch time. The ballast, an elementwise operation on a large tensor, keeps the
        // device busy during the launch.
        if let Some(ballast) = &self.ballast {
            for _ in 0..BALLAST {
                self.flushed(|| ballast.clone().add_scalar(1.0))?;
            }
        }
        Ok(window(&self.device, run)?.0)
    }
}

/// Measures `run` with Burn's profiler. Returns the time in seconds, and whether the device or the host measured the
/// time.
fn window<O: Send + 'static>(
    device: &Device,
    run: impl FnOnce() -> O + Send,
) -> Result<(f64, TimingMethod), Error> {
    device.flush()?;
    let (output, duration) = device.profile_with(ProfileOptions::default().flush(), run)?;
    let method = duration.timing_method();
    let ticks = read_sync(duration.resolve()).ok_or("the device returned no measurement")?;
    drop(output);
    Ok((ticks.duration().as_secs_f64(), method))
}
