//! Measures the time and the errors of one forward or backward with one peer. A peer is an implementation of attention.

use crate::bench::Bench;
use crate::peers::{Peer, Prepared};
use crate::report::{Measured, Pass, Unit};
use attention_cube::AttentionProblem;
use attention_workspace::{
    Error,
    accuracy::{Errors, Oracle, Triple},
    workload::{Inputs, Workload, backward_operations, forward_operations},
};
use burn::tensor::Tensor;

/// The identity of one result: the case, the peer (the implementation of attention) and the pass.
pub struct Entry<'a> {
    pub workload: &'a Workload,
    pub inputs: &'a Inputs,
    pub problem: &'a AttentionProblem,
    pub oracle: Option<&'a Oracle>,
    pub peer: Peer,
    pub pass: Pass,
}

struct Times {
    single: f64,
    launches: usize,
    /// The time per launch in seconds when launches follow each other without a pause. For the backward, it is the time
    /// of a training step minus the times of the forward and of the loss. The field is `None` if noise makes this
    /// difference zero or negative.
    sustained: Option<f64>,
    errors: Option<Errors>,
}

/// A training step whose forward and loss are done, so that only the backward remains.
struct Step {
    inputs: Triple,
    /// The elementwise product of the output and the output's gradient. The loss is the sum of this product. The sum is
    /// not computed, because Burn's `backward` differentiates the sum of a tensor's elements.
    loss: Tensor<4>,
}

impl Step {
    fn new(prepared: &Prepared, gradient: Tensor<4>) -> Result<Self, Error> {
        let inputs = prepared.tracked();
        let output = prepared.forward(inputs.clone())?;
        Ok(Self {
            inputs,
            loss: output * gradient.autodiff(),
        })
    }

    fn gradients(self) -> Result<Triple, Error> {
        let mut gradients = self.loss.backward();
        let [query, key, value] = self.inputs.map(|input| input.grad_remove(&mut gradients));
        let missing = "an input has no gradient";
        Ok([
            query.ok_or(missing)?,
            key.ok_or(missing)?,
            value.ok_or(missing)?,
        ])
    }
}

impl Bench<'_> {
    pub fn measure(&self, entry: &Entry) -> Result<(Measured, Option<String>), Error> {
        let prepared = Prepared::new(entry.peer, entry.workload, entry.inputs, entry.problem);
        let times = match entry.pass {
            Pass::Forward => self.forward(entry, &prepared)?,
            Pass::Backward => self.backward(entry, &prepared)?,
        };
        let (work, unit, ceiling) = match (entry.workload.is_decode(), entry.pass) {
            (true, _) => (
                entry.workload.key_value_bytes(),
                Unit::Bytes,
                self.report.ceilings.bytes,
            ),
            (false, Pass::Forward) => (
                forward_operations(entry.problem),
                Unit::Flops,
                self.report.ceilings.flops,
            ),
            (false, Pass::Backward) => (
                backward_operations(entry.problem),
                Unit::Flops,
                self.report.ceilings.flops,
            ),
        };
        let rate = work / times.single;
        let measured = Measured {
            milliseconds: times.single * 1e3,
            launches: times.launches,
            sustained_milliseconds: times.sustained.map(|seconds| seconds * 1e3),
            rate,
            sustained_rate: times.sustained.map(|seconds| work / seconds),
            unit,
            percent_of_ceiling: ceiling.map(|ceiling| 100.0 * rate / ceiling),
            errors: times.errors,
        };
        Ok((measured, prepared.note))
    }

    fn forward(&self, entry: &Entry, prepared: &Prepared) -> Result<Times, Error> {
        // Before the timing, compare one output with the reference result, if there is one. If a launch fails, the
        // error is reported only when the output of the launch is read.
        let output = prepared.forward(prepared.plain())?;
        let errors = entry
            .oracle
            .map(|oracle| oracle.output(&output))
            .transpose()?;
        drop(output);

        let effort = self.report.effort;
        let run = |inputs| prepared.forward(inputs);
        let singles = self
            .timer
            .singles(effort, || prepared.plain(), |i| run(i).map_err(drop))?;
        let sustained = self.timer.sustained(effort, singles.median, || {
            run(prepared.plain()).map_err(drop)
        })?;
        Ok(Times {
            single: singles.median,
            launches: singles.launches,
            sustained: Some(sustained),
            errors,
        })
    }

    fn backward(&self, entry: &Entry, prepared: &Prepared) -> Result<Times, Error> {
        let gradient = &prepared.inputs.gradient;
        let errors = match entry.oracle {
            Some(oracle) => {
                let masked = gradient.clone() * oracle.gradient_mask(gradient);
                let step = Step::new(prepared, masked)?;
                Some(oracle.gradients(&prepared.folded(step.gradients()?))?)
            }
            None => None,
        };

        let effort = self.report.effort;
        let step = || Step::new(prepared, gradient.clone());
        let gradients = |step: Result<Step, Error>| step.and_then(Step::gradients).map_err(drop);
        let singles = self.timer.singles(effort, step, gradients)?;

        // This closure computes the loss from a leaf tensor in place of the output. The backward of this loss therefore
        // takes only the time to differentiate the loss, without attention.
        let loss = || {
            let leaf = gradient.clone().autodiff().require_grad();
            (leaf.clone(), leaf * gradient.clone().autodiff())
        };
        let backward = |(leaf, loss): (Tensor<4>, Tensor<4>)| leaf.grad(&loss.backward());
        let loss_single = self.timer.singles(effort, loss, backward)?.median;
        let single = (singles.median - loss_single).max(0.0);

        let both = self
            .timer
            .sustained(effort, 2.0 * singles.median, || gradients(step()))?;
        let forward = self.timer.sustained(effort, singles.median, || {
            prepared.forward(prepared.tracked()).map_err(drop)
        })?;
        let loss = self
            .timer
            .sustained(effort, loss_single, || backward(loss()))?;
        let sustained = Some(both - forward - loss).filter(|difference| *difference > 0.0);
        Ok(Times {
            single,
            launches: singles.launches,
            sustained,
            errors,
        })
    }
}
