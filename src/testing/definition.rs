//! Runs the reference implementation of a case in f64 on the CPU, and compares a device's results with these expected
//! results.

use super::case::Case;
use super::compare::{Comparison, Deviation, Named};
use super::dense::Layout;
use super::inputs::Inputs;
use super::run::Operator;
use burn::tensor::{DType, Device};
use std::cell::OnceCell;

/// [`Definition::random_faults`] accepts errors of up to this factor times the allowed error.
const STORED: f64 = 4.0;

/// The results of the reference implementation for a case.
pub struct Definition<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    exact: Vec<Named>,
    /// The baseline: the results of the reference implementation in the case's dtype.
    baseline: OnceCell<Vec<Named>>,
    /// The results of the unfused operator in the case's dtype. Unlike the reference implementation, this operator stores
    /// output and logsumexp between forward and backward.
    stored: OnceCell<Vec<Named>>,
}

impl<'a> Definition<'a> {
    /// Computes the exact results with the reference implementation in f64.
    pub fn new(case: &'a Case, inputs: &'a Inputs) -> Self {
        Self {
            case,
            inputs,
            exact: case.run(inputs, &Device::flex(), DType::F64, Operator::Reference),
            baseline: OnceCell::new(),
            stored: OnceCell::new(),
        }
    }

    /// Returns the exact results, which the reference implementation computed in f64.
    pub fn exact(&self) -> &[Named] {
        &self.exact
    }

    /// Returns the faults of `got`. A fault is a result whose error exceeds the allowed error, or an element that
    /// should be exactly zero but is not.
    ///
    /// # Panics
    /// Panics if `got` has fewer results than the reference implementation, or results of another size.
    pub fn faults(&self, got: &[Named]) -> Vec<String> {
        let far = self.further_off(got, self.exact.len()).into_iter();
        far.map(|far| far.to_string())
            .chain(self.not_zero(got))
            .collect()
    }

    /// Returns the faults like [`faults`](Self::faults), but accepts larger errors, because the case has random data.
    ///
    /// The allowed errors of [`compare`](super::compare) are too small for two kinds of random data. In the first kind,
    /// a few rows have nearly all of the output's magnitude. In the second kind, the scores are so large that rounding
    /// the logsumexp to f32 loses the differences between scores.
    ///
    /// An error of up to four times the allowed error is therefore accepted, if the unfused backward in the same dtype
    /// has a similar error.
    ///
    /// Dropout with the probability `p` makes the first kind common: with few keys, only the share `1 − p` of the rows has
    /// an output. The errors of these rows exceed the root mean square over all rows by the factor `1 / √(1 − p)`. At the
    /// worst element, an error that is larger by this factor is accepted, under the same condition.
    ///
    /// # Panics
    /// Panics like [`faults`](Self::faults).
    pub fn random_faults(&self, got: &[Named]) -> Vec<String> {
        let kept = 1.0 - self.case.dropout.map_or(0.0, |(dropped, _)| dropped);
        let is_explained = |far: &Comparison| {
            let within = |error: Deviation, allowed: Deviation| {
                error.mean <= STORED * allowed.mean
                    && error.worst <= STORED * allowed.worst / kept.sqrt()
            };
            let index = got.iter().position(|got| got.name == far.name);
            within(far.error, far.allowed)
                && index.is_some_and(|index| self.compare(index, got, self.stored()).is_close())
        };
        let mut far = self.further_off(got, self.exact.len());
        far.retain(|far| !is_explained(far));
        let far = far.iter().map(ToString::to_string);
        far.chain(self.not_zero(got)).collect()
    }

    fn compare(&self, index: usize, got: &[Named], baseline: &[Named]) -> Comparison {
        let precision = self.case.precision();
        Comparison::new(&got[index], &self.exact[index], &baseline[index], precision)
    }

    /// Returns the results in `got` whose errors exceed the allowed errors.
    pub fn far_among(&self, got: &[Named]) -> Vec<String> {
        let far = self.further_off(got, got.len()).into_iter();
        far.map(|far| far.to_string()).collect()
    }

    fn further_off(&self, got: &[Named], count: usize) -> Vec<Comparison> {
        // Computing the real baseline takes as long as all other work of the check. Each result is therefore first
        // compared with the exact results as the baseline, which allows the smallest errors. The real baseline is
        // computed only if this first comparison fails.
        let far = |index: &usize| !self.compare(*index, got, &self.exact).is_close();
        (0..count)
            .filter(far)
            .map(|index| self.compare(index, got, self.baseline()))
            .filter(|comparison| !comparison.is_close())
            .collect()
    }

    fn baseline(&self) -> &[Named] {
        (self.baseline).get_or_init(|| self.in_its_dtype(Operator::Reference))
    }

    fn stored(&self) -> &[Named] {
        (self.stored).get_or_init(|| self.in_its_dtype(Operator::Fused))
    }

    fn in_its_dtype(&self, operator: Operator) -> Vec<Named> {
        let Self { case, inputs, .. } = self;
        case.run(inputs, &Device::flex(), case.dtype, operator)
    }

    /// Returns a fault if a row that must be exactly zero is not zero, and `None` otherwise. If a query sees no key, its
    /// output and its gradient are zero. If no query sees a key, the gradients of the key and its value are zero.
    fn not_zero(&self, got: &[Named]) -> Option<String> {
        if self.case.layouts != [Layout::Contiguous; 4] {
            return None;
        }
        let [output, query, key, value] =
            ["output", "query gradient", "key gradient", "value gradient"].map(|name| {
                let index = self.exact.iter().position(|named| named.name == name);
                index.unwrap_or_else(|| panic!("{:?}: no {name}", self.case))
            });
        for (wide, narrow) in [(output, query), (value, key)] {
            let is_zero = |results: &[Named], index: usize, row: usize| {
                let columns = match index == wide {
                    true => self.case.value_dim,
                    false => self.case.head_dim,
                };
                let row = &results[index].values[row * columns..][..columns];
                row.iter().all(|x| *x == 0.0)
            };
            for row in 0..self.exact[wide].values.len() / self.case.value_dim {
                let both = [wide, narrow];
                if both.iter().all(|index| is_zero(&self.exact, *index, row))
                    && let Some(index) = both.iter().find(|index| !is_zero(got, **index, row))
                {
                    return Some(format!("row {row} of {} is not 0", got[*index].name));
                }
            }
        }
        None
    }
}
