//! Vector clocks: what a warp knows of what all others have done. What one did before a barrier that both went through, the other
//! knows; an access that it does not know of may come before or after its own.

#[derive(Clone, Debug)]
pub struct Clock {
    owner: usize,
    times: Vec<u32>,
}

impl Clock {
    /// Of `owner`, among so many actors.
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

    /// The owner's own time.
    pub fn now(&self) -> u32 {
        self.times[self.owner]
    }

    pub fn times(&self) -> &[u32] {
        &self.times
    }

    /// Whether what an actor did at that time has been before.
    pub fn knows(&self, actor: usize, time: u32) -> bool {
        time <= self.times[actor]
    }

    /// What comes now is later than what others may have learnt.
    pub fn tick(&mut self) {
        self.times[self.owner] += 1;
    }

    pub fn learn(&mut self, times: &[u32]) {
        join(&mut self.times, times);
    }
}

/// What either knows.
pub fn join(times: &mut [u32], other: &[u32]) {
    for (time, other) in times.iter_mut().zip(other) {
        *time = (*time).max(*other);
    }
}
