//! The instructions that combine the values of several lanes of a warp: shuffles, votes, matches and reductions.

use super::warp::{LANES, Warp, lanes};
use crate::fault::Fault;
use crate::ptx::{Match, Reduce, Register, Shuffle, ShuffleMode, Vote, VoteMode};

impl Warp {
    pub fn shuffle(&mut self, shuffle: &Shuffle, mask: u32) {
        let values = self.words[shuffle.value as usize];
        let (by, segments) = (
            self.words[shuffle.lane as usize],
            self.words[shuffle.segment as usize],
        );
        let mut found = 0;
        for lane in lanes(mask) {
            let (own, by) = (lane as i32, (by[lane] & 31) as i32);
            let (clamp, segment) = (
                (segments[lane] & 31) as i32,
                (segments[lane] >> 8 & 31) as i32,
            );
            let first = own & segment;
            let last = first | clamp & !segment;
            let (from, inside) = match shuffle.mode {
                ShuffleMode::Up => (own - by, own - by >= last),
                ShuffleMode::Down => (own + by, own + by <= last),
                ShuffleMode::Butterfly => (own ^ by, own ^ by <= last),
                ShuffleMode::Index => {
                    let from = first | by & !segment;
                    (from, from <= last)
                }
            };
            let from = if inside { from as usize % LANES } else { lane };
            self.words[shuffle.to as usize][lane] = values[from];
            found |= u32::from(inside) << lane;
        }
        if let Some(to) = shuffle.found {
            self.put_predicate(to, found, mask);
        }
    }

    pub fn vote(&mut self, vote: &Vote, mask: u32) {
        let votes = self.holds(vote.condition) & mask;
        let result = match vote.mode {
            VoteMode::Any => u64::from(votes != 0),
            VoteMode::All => u64::from(votes == mask),
            VoteMode::Uniform => u64::from(votes == mask || votes == 0),
            VoteMode::Ballot => votes.into(),
        };
        for lane in lanes(mask) {
            self.set(vote.to, lane, result);
        }
    }

    pub fn match_lanes(&mut self, matching: &Match, mask: u32) {
        let values = self.row(matching.value);
        for lane in lanes(mask) {
            let same = lanes(mask)
                .filter(|other| values[*other] == values[lane])
                .fold(0, |same, other| same | 1 << other);
            let result = if matching.all && same != mask {
                0
            } else {
                same
            };
            self.words[matching.to as usize][lane] = result;
            if let Some(agree) = matching.agree {
                self.set(Register::Predicate(agree), lane, (same == mask).into());
            }
        }
    }

    /// Reduces the values of the lanes in `mask` to one value, and stores that value in each of these lanes.
    ///
    /// # Errors
    /// Returns an error if the operation is not supported for this type.
    pub fn reduce(&mut self, reduce: &Reduce, mask: u32) -> Result<(), Fault> {
        let values = self.words[reduce.value as usize];
        let mut of_lanes = lanes(mask).map(|lane| u64::from(values[lane]));
        let Some(mut result) = of_lanes.next() else {
            return Ok(());
        };
        for value in of_lanes {
            result = reduce
                .arithmetic
                .of([result, value, 0, 0])
                .ok_or_else(|| Fault::Unsupported(format!("{:?}", reduce.arithmetic)))?;
        }
        for lane in lanes(mask) {
            self.words[reduce.to as usize][lane] = result as u32;
        }
        Ok(())
    }
}
