//! The results of the benchmark, and the table that it prints.

use attention_workspace::workload::Workload;
use serde::Serialize;

/// All results of a run.
#[derive(Serialize)]
pub struct Report {
    pub date: String,
    pub device: String,
    pub ranks: usize,
    pub workload: Workload,
    pub operations: Operations,
    pub one_device: Times,
    pub ring: Times,
    pub errors: Errors,
}

/// The number of floating-point operations of the passes over the whole sequence.
#[derive(Serialize)]
pub struct Operations {
    pub forward: f64,
    pub backward: f64,
}

/// The times of the passes over the whole sequence, in seconds.
#[derive(Serialize)]
pub struct Times {
    pub forward: f64,
    pub backward: f64,
}

/// The relative errors of the ring's results against those of one device, in the Frobenius norm.
#[derive(Serialize)]
pub struct Errors {
    pub output: f64,
    pub query: f64,
    pub key: f64,
    pub value: f64,
}

impl Report {
    /// Prints the times, the rates per device, the speedups and the errors.
    pub fn print(&self) {
        println!(
            "\n{:12} {:>12} {:>10} {:>12} {:>10} {:>12} {:>10}",
            "", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "both ms", "TFLOP/s"
        );
        self.print_times("one device", &self.one_device, 1);
        self.print_times(&format!("ring of {}", self.ranks), &self.ring, self.ranks);
        let [forward, backward, both] = self.speedups();
        println!(
            "{:12} {forward:>11.2}x {:>10} {backward:>11.2}x {:>10} {both:>11.2}x",
            "speedup", "", ""
        );
        let Errors {
            output,
            query,
            key,
            value,
        } = &self.errors;
        println!(
            "\nTFLOP/s are per device. Relative errors of the ring against one device: output {output:.1e}, gradients of \
             query {query:.1e}, key {key:.1e}, value {value:.1e}"
        );
    }

    /// True if all errors are at most twice the dtype's epsilon, or 10⁻⁵ if that is larger.
    pub fn is_good(&self) -> bool {
        let info = self.workload.dtype.burn().finfo();
        let allowed = info.map_or(0.0, |info| 2.0 * info.epsilon).max(1e-5);
        let Errors {
            output,
            query,
            key,
            value,
        } = self.errors;
        // NaN fails each comparison.
        [output, query, key, value]
            .into_iter()
            .all(|error| error <= allowed)
    }

    /// Returns the speedups of the forward, of the backward and of both passes.
    fn speedups(&self) -> [f64; 3] {
        let (one, ring) = (&self.one_device, &self.ring);
        [
            one.forward / ring.forward,
            one.backward / ring.backward,
            one.both() / ring.both(),
        ]
    }

    fn print_times(&self, name: &str, times: &Times, devices: usize) {
        let Operations { forward, backward } = self.operations;
        let rate = |operations: f64, seconds: f64| operations / seconds / devices as f64 / 1e12;
        println!(
            "{name:12} {:>12.2} {:>10.2} {:>12.2} {:>10.2} {:>12.2} {:>10.2}",
            times.forward * 1e3,
            rate(forward, times.forward),
            times.backward * 1e3,
            rate(backward, times.backward),
            times.both() * 1e3,
            rate(forward + backward, times.both()),
        );
    }
}

impl Times {
    fn both(&self) -> f64 {
        self.forward + self.backward
    }
}
