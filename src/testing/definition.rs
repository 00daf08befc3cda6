//! What a case should give: the definition in f64 on the processor, and how close a device comes to it.

use super::case::Case;
use super::compare::{Comparison, Deviation, Named};
use super::dense::Layout;
use super::inputs::Inputs;
use super::run::Operator;
use burn::tensor::{DType, Device};
use std::cell::OnceCell;

/// How much further off than allowed a result may be that the explicit backward explains.
const STORED: f64 = 4.0;

/// What the definition makes of a case.
pub struct Definition<'a> {
    case: &'a Case,
    inputs: &'a Inputs,
    exact: Vec<Named>,
    /// The same mathematics in the case's dtype, once a comparison needs it.
    baseline: OnceCell<Vec<Named>>,
    /// The same with the output and the logsumexp stored between forward and backward.
    stored: OnceCell<Vec<Named>>,
}

impl<'a> Definition<'a> {
    /// Computes it.
    pub fn new(case: &'a Case, inputs: &'a Inputs) -> Self {
        Self {
            case,
            inputs,
            exact: case.run(inputs, &Device::flex(), DType::F64, Operator::Reference),
            baseline: OnceCell::new(),
            stored: OnceCell::new(),
        }
    }

    /// The results in f64.
    pub fn exact(&self) -> &[Named] {
        &self.exact
    }

    /// What is wrong with `got`: results further off than the dtype explains, and what should be exactly zero and is not.
    ///
    /// # Panics
    /// Where `got` has other results.
    pub fn faults(&self, got: &[Named]) -> Vec<String> {
        let far = self.further_off(got, self.exact.len()).into_iter();
        far.map(|far| far.to_string())
            .chain(self.not_zero(got))
            .collect()
    }

    /// [`faults`](Self::faults) of random data, among which are few rows that have nearly all of the output, and scores
    /// so large that a logsumexp in f32 tells them apart by little. There the sizes of [`compare`](super::compare) say too
    /// little of what rounding the stored results does: the unfused backward in the same dtype, which has them stored as
    /// well, shows it. What it explains by twice its error may be four times as far off.
    ///
    /// # Panics
    /// As [`faults`](Self::faults).
    pub fn random_faults(&self, got: &[Named]) -> Vec<String> {
        let is_explained = |far: &Comparison| {
            let within = |error: Deviation, allowed: Deviation| {
                error.mean <= STORED * allowed.mean && error.worst <= STORED * allowed.worst
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

    /// What is further off than the dtype explains of the first results, as many as there are in `got`.
    ///
    /// # Panics
    /// As [`faults`](Self::faults).
    pub fn far_among(&self, got: &[Named]) -> Vec<String> {
        let far = self.further_off(got, got.len()).into_iter();
        far.map(|far| far.to_string()).collect()
    }

    fn further_off(&self, got: &[Named], count: usize) -> Vec<Comparison> {
        // The baseline allows more, and takes as long as all else: most results do without.
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

    /// A query that saw nothing and a key that nobody saw have zeros in their rows of both results
    /// (but for an output's gradient of zeros); these are exact.
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
