//! Vector clocks for race detection. An actor is a warp, or the one actor that stands for all TMA loads. Each warp owns
//! a clock, which has an entry for every actor. If the entry of actor `a` is the time `t`, all accesses of `a` up to
//! time `t` happened before the owner's next access. A barrier joins the clocks of its warps.

#[derive(Clone, Debug)]
pub struct Clock {
    owner: usize,
    times: Vec<u32>,
}

impl Clock {
    /// Returns the initial clock of the warp `owner`. The clock has one entry for each of `actors` actors: the warps,
    /// and one actor for all TMA loads.
    pub fn new(owner: usize, actors: usize) -> Self {
        let mut clock = Self {
            owner,
            times: vec![0; actors],
        };
        clock.reset();
        clock
    }

    pub fn reset(&mut self) {
        self.times.fill(0);
        self.times[self.owner] = 1;
    }

    pub fn owner(&self) -> usize {
        self.owner
    }

    /// Returns the owner's own current time.
    pub fn now(&self) -> u32 {
        self.times[self.owner]
    }

    pub fn times(&self) -> &[u32] {
        &self.times
    }

    /// Returns true if the access that `actor` made at `time` happened before the next access of the clock's owner.
    pub fn knows(&self, actor: usize, time: u32) -> bool {
        time <= self.times[actor]
    }

    /// Advances the owner's time by 1. Suppose that another warp has joined this clock into its own clock. The owner's
    /// accesses up to the old time then happened before the other warp's later accesses. The owner's accesses at the
    /// new time are not ordered with the other warp's accesses.
    pub fn tick(&mut self) {
        self.times[self.owner] += 1;
    }

    pub fn learn(&mut self, times: &[u32]) {
        join(&mut self.times, times);
    }
}

/// Joins the clock `other` into the clock `times` by the elementwise maximum.
pub fn join(times: &mut [u32], other: &[u32]) {
    for (time, other) in times.iter_mut().zip(other) {
        *time = (*time).max(*other);
    }
}
