//! Prints the progress of a run as lines of text. The lines replace Burn's dashboard if the output is not a terminal.

use crate::{checkpoint::stop::Stop, data::schedule::Schedule, optim::skipped_steps::SkippedSteps};
use burn::train::{
    LearnerSummary,
    logger::{EvaluationProgressLogger, TrainingProgressLogger},
    metric::{MetricDefinition, MetricId, NumericEntry},
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};
use std::{
    collections::HashMap,
    io::{self, Write},
    sync::Arc,
    time::Instant,
};

/// A renderer that prints a line every few steps, and a line after each validation.
pub struct ProgressLines {
    schedule: Schedule,
    stop: Stop,
    skipped: SkippedSteps,
    /// The number of steps between two lines.
    every: usize,
    /// The number of rows per batch, and the number of tokens per row.
    size: [usize; 2],
    names: HashMap<MetricId, Arc<String>>,
    /// The index of the current interval. An interval consists of the steps between two checkpoints.
    interval: usize,
    losses: Vec<f64>,
    /// The time at which the last line was printed.
    since: Instant,
    last_step: usize,
    /// True once standard output is closed.
    is_closed: bool,
}

impl ProgressLines {
    /// Creates a renderer that prints a line every `every` steps. `size` is the number of rows per batch, and the number of
    /// tokens per row.
    pub fn new(
        schedule: Schedule,
        stop: Stop,
        skipped: SkippedSteps,
        every: usize,
        size: [usize; 2],
    ) -> Self {
        Self {
            schedule,
            stop,
            skipped,
            every,
            size,
            names: HashMap::new(),
            interval: 0,
            losses: Vec::new(),
            since: Instant::now(),
            last_step: 0,
            is_closed: false,
        }
    }

    /// Prints a line if this is the first process.
    fn print(&mut self, line: String) {
        if self.schedule.part.0 == 0 && !self.is_closed {
            let mut output = io::stdout().lock();
            let written = writeln!(output, "{line}").and_then(|()| output.flush());
            // A write error does not end the run. The program that reads the output may have closed the pipe.
            self.is_closed = written.is_err();
        }
    }

    /// Handles the end of one device's report of a step. Once all devices have reported the step, prints a line if a
    /// line is due.
    fn part(&mut self, learning_rate: f64) {
        let Schedule {
            steps,
            interval,
            accumulation,
            ..
        } = self.schedule;
        let processes = self.schedule.part.1;
        let devices = self.schedule.devices / processes;
        let step = self.last_step + self.losses.len() / devices;
        let is_last = step.is_multiple_of(interval) || step == steps;
        let is_asked = step.is_multiple_of(self.every) || is_last;
        if !self.losses.len().is_multiple_of(devices) || !is_asked {
            return;
        }
        let loss = self.losses.iter().sum::<f64>() / self.losses.len() as f64;
        let batches = self.losses.len() * processes * accumulation;
        let tokens = batches * self.size[0] * self.size[1];
        let skipped = match self.skipped.value() {
            0 => String::new(),
            count => format!("  {count} steps left out"),
        };
        self.print(format!(
            "step {step}/{steps}  loss {loss:.4}  learning rate {learning_rate:.2e}  {:.0} tokens/s{skipped}",
            tokens as f64 / self.since.elapsed().as_secs_f64(),
        ));
        self.losses.clear();
        self.since = Instant::now();
        self.last_step = step;
    }

    fn is(&self, id: &MetricId, name: &str) -> bool {
        self.names
            .get(id)
            .is_some_and(|known| known.as_str() == name)
    }
}

impl MetricsRendererTraining for ProgressLines {
    fn update_train(&mut self, state: MetricState) {
        let MetricState::Numeric(entry, Some(value)) = state else {
            return;
        };
        match value {
            // An entry of the kind `Final` is ignored, because it is the mean over an interval and not the value of a
            // step.
            NumericEntry::Final(_) => (),
            value if self.is(&entry.metric_id, "Loss") => self.losses.push(value.current()),
            // For each device and step, Burn reports first the loss and then the learning rate.
            value if self.is(&entry.metric_id, "Learning Rate") => self.part(value.current()),
            _ => (),
        }
    }

    fn update_valid(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, Some(NumericEntry::Final(loss))) = state
            && self.is(&entry.metric_id, "Loss")
            && !self.stop.is_asked()
        {
            let step = self.schedule.steps_of(self.interval).end;
            self.print(format!(
                "step {step}/{}  validation loss {loss:.4}",
                self.schedule.steps
            ));
        }
    }

    fn on_train_end(
        &mut self,
        _summary: Option<LearnerSummary>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        Ok(())
    }
}

impl TrainingProgressLogger for ProgressLines {
    fn start(
        &mut self,
        _total_epochs: usize,
        starting_epoch: usize,
        _total_items: Option<usize>,
        _label: Option<&str>,
    ) {
        self.interval = starting_epoch - 1;
        self.last_step = self.schedule.steps_of(self.interval).start;
        self.since = Instant::now();
    }

    fn update_epoch(&mut self, epoch: usize) {
        self.interval = epoch;
        // The clock restarts here, so that the next line's speed leaves out the time of validation and checkpoints.
        self.since = Instant::now();
    }

    fn start_split(&mut self, _split: &str, _total_items: usize) {}

    fn update_split(&mut self, _items_processed: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

/// Burn requires this trait for every metrics renderer. A training run does not call its methods, so they do nothing.
impl EvaluationProgressLogger for ProgressLines {
    fn start_global_progress(&mut self, _total_tests: usize) {}

    fn start_test(&mut self, _name: &str, _total_items: usize) {}

    fn update_test_progress(&mut self, _items_processed: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRendererEvaluation for ProgressLines {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl MetricsRenderer for ProgressLines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}
