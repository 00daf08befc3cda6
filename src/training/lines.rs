//! A run's progress in lines of text, where there is no terminal for Burn's dashboard.

use super::{loader::Schedule, skipped::Skipped, stop::Stop};
use crate::terminal::Output;
use burn::train::{
    LearnerSummary,
    logger::{EvaluationProgressLogger, TrainingProgressLogger},
    metric::{MetricDefinition, MetricId, NumericEntry},
    renderer::{
        EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
        MetricsRendererTraining,
    },
};
use std::{collections::HashMap, sync::Arc, time::Instant};

/// Prints a line every few steps, and one after each validation.
pub struct Lines {
    schedule: Schedule,
    stop: Stop,
    skipped: Skipped,
    /// Steps from one line to the next.
    every: usize,
    /// Rows of a batch, and tokens of a row.
    size: [usize; 2],
    names: HashMap<MetricId, Arc<String>>,
    /// The interval that is under way.
    interval: usize,
    losses: Vec<f64>,
    /// Since the last line.
    since: Instant,
    last_step: usize,
    output: Output,
}

impl Lines {
    /// A line every `every` steps. Batches are of `size`, rows and tokens.
    pub fn new(
        schedule: Schedule,
        stop: Stop,
        skipped: Skipped,
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
            output: Output::default(),
        }
    }

    /// In the first of several processes.
    fn print(&mut self, line: String) {
        if self.schedule.part.0 == 0 {
            // Whoever stopped reading may still want the model.
            let _ = self.output.write(&(line + "\n"));
        }
    }

    /// After each device's part of a step. One may end its last step of an interval when another has begun to validate.
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

impl MetricsRendererTraining for Lines {
    fn update_train(&mut self, state: MetricState) {
        let MetricState::Numeric(entry, Some(value)) = state else {
            return;
        };
        match value {
            // The mean of an interval, after its end.
            NumericEntry::Final(_) => (),
            value if self.is(&entry.metric_id, "Loss") => self.losses.push(value.current()),
            // It comes after the loss of the same part.
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

impl TrainingProgressLogger for Lines {
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
        // Validation and checkpoints are not what the next line's speed is about.
        self.since = Instant::now();
    }

    fn start_split(&mut self, _split: &str, _total_items: usize) {}

    fn update_split(&mut self, _items_processed: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _event: String) {}
}

/// Nothing is evaluated here, but Burn's renderers do both.
impl EvaluationProgressLogger for Lines {
    fn start_global_progress(&mut self, _total_tests: usize) {}

    fn start_test(&mut self, _name: &str, _total_items: usize) {}

    fn update_test_progress(&mut self, _items_processed: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _event: String) {}
}

impl MetricsRendererEvaluation for Lines {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
}

impl MetricsRenderer for Lines {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.names.insert(definition.metric_id, definition.name);
    }
}
