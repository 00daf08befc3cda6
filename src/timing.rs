//! Times of work on a device.

use crate::{Dtype, Error};
use burn::backend::read_sync;
use burn::tensor::{DType, Device, ProfileOptions, Tensor, TimingMethod};
use std::time::{Duration, Instant};

/// Before single launches a GPU rests so long, since one that comes from a warm-up or from other cases at its power cap is 3 to
/// 5 % slower: the median is a short burst's, and the sustained mean beside it is the cap's.
const REST: Duration = Duration::from_secs(1);

/// Launches of ballast before each single launch. A backward's way through autodiff takes the host milliseconds, and a card
/// milliseconds to come to its clock: with 4 of them the backward at D256 measured 437 TFLOP/s, with 16 446, with 48 462.
const BALLAST: usize = 48;

/// How much to measure.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Effort {
    /// Single launches; the median counts.
    pub launches: usize,
    /// Launches back to back.
    pub sustained: usize,
    /// Both stop early after so many seconds each.
    pub seconds: f64,
}

/// The median of single launches.
#[derive(Clone, Copy, Debug)]
pub struct Singles {
    pub median: f64,
    pub launches: usize,
}

/// Measures work on one device.
pub struct Timer {
    device: Device,
    /// Whether the device stamps its own times.
    on_device: bool,
    /// Keeps a GPU busy while the host prepares the launch to be timed.
    ballast: Option<Tensor<1>>,
}

impl Timer {
    /// A timer for `device`; `software` where a processor does its work.
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

    /// Which clock counts.
    pub fn clock(&self) -> &'static str {
        match self.on_device {
            true => "the device's clock",
            false => "the wall clock, from launch to sync",
        }
    }

    /// The median time of `run` alone. What `prepare` puts on the device runs before the window opens.
    ///
    /// # Errors
    /// Where the device reports a fault.
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

    /// The mean time of `run` over launches back to back, by the wall clock.
    ///
    /// # Errors
    /// Where the device reports a fault.
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

    /// Bytes a second of an elementwise operation over a large tensor, reads and writes.
    ///
    /// # Errors
    /// Where the device reports a fault.
    pub fn memory_rate(&self, dtype: Dtype, effort: Effort) -> Result<f64, Error> {
        let elements: usize = match self.ballast {
            Some(_) => 512 << 20,
            None => 16 << 20,
        };
        let wide = Tensor::<2>::zeros([elements >> 10, 1 << 10], (&self.device, dtype.burn()));
        let copy = self.singles(effort, || wide.clone(), |wide| wide.add_scalar(1.0))?;
        Ok((2 * elements * dtype.burn().size()) as f64 / copy.median)
    }

    /// Compiles, fills memory pools, brings clocks up, and goes on while launches still get faster, since
    /// Burn tunes its operators and explores fusions over several of them.
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

    /// Puts work on the device. Lazy backends would otherwise collect it until the next sync, and leave
    /// out what nobody holds by then.
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
        // A window opens as soon as the device is idle; without work before it, it would also hold the
        // host's time to launch.
        if let Some(ballast) = &self.ballast {
            for _ in 0..BALLAST {
                self.flushed(|| ballast.clone().add_scalar(1.0))?;
            }
        }
        Ok(window(&self.device, run)?.0)
    }
}

/// The time that the device's own window gives.
fn window<O: Send + 'static>(
    device: &Device,
    run: impl FnOnce() -> O + Send,
) -> Result<(f64, TimingMethod), Error> {
    device.flush()?;
    let (output, duration) = device.profile_with(ProfileOptions::default().flush(), run)?;
    let method = duration.timing_method();
    let ticks = read_sync(duration.resolve()).ok_or("the device measured nothing")?;
    drop(output);
    Ok((ticks.duration().as_secs_f64(), method))
}
