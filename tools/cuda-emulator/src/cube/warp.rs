//! A warp: its registers, the instruction at which each lane is, and its pending copies and matrix multiplications.

use std::collections::VecDeque;

use super::Launch;
use super::clock::Clock;
use super::copies::Copies;
use crate::matrix::Product;
use crate::ptx::{Class, Guard, Register, Special};

/// The number of lanes per warp.
pub const LANES: usize = 32;

/// The mask that selects all lanes.
pub const ALL: u32 = u32::MAX;

pub type WordRow = [u32; LANES];
pub type DoubleRow = [u64; LANES];

/// The byte with which shared and local memory are filled initially. Numbers that consist of this byte only are NaN in
/// every float type.
pub const POISON: u8 = 0xff;

/// Returns an iterator over the indices of the lanes in a mask.
pub fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        let lane = (rest != 0).then(|| rest.trailing_zeros() as usize);
        rest &= rest.wrapping_sub(1);
        lane
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    /// The warp waits at a barrier until the barrier opens.
    AtBarrier(u32),
    Done,
}

/// The lanes of a warp that are at the same instruction.
pub struct Group {
    pub at: u32,
    pub mask: u32,
    /// The lowest instruction index above `at` among the other lanes of the warp. At this index, the group may
    /// reconverge with those lanes.
    pub others: u32,
}

pub struct Warp {
    pub id: usize,
    pub state: State,
    /// The mask of the lanes that have not exited.
    pub live: u32,
    /// The mask of the lanes that wait for other lanes of the same warp.
    pub parked: u32,
    /// The mask of the lanes that sleep or that poll an incomplete mbarrier phase. The other lanes of the warp run
    /// before such a lane continues.
    pub spinning: u32,
    place: [u32; LANES],
    pub predicates: Vec<u32>,
    pub words: Vec<WordRow>,
    pub doubles: Vec<DoubleRow>,
    /// The local memory of all lanes, lane after lane.
    pub local: Vec<u8>,
    pub clock: Clock,
    pub copies: Copies,
    /// The pending `wgmma` instructions, in groups. The last group is not committed yet.
    pub products: VecDeque<Vec<Product>>,
    /// The pending TMA stores, in groups. The last group is not committed yet.
    pub stores: VecDeque<Vec<BoxStore>>,
}

/// A pending TMA store of a box. For each 16-byte piece, it has the source offset in shared memory, the target address
/// in global memory, and the number of bytes.
pub struct BoxStore {
    pub pieces: Vec<(usize, u64, usize)>,
}

impl Warp {
    /// Creates a warp, which is reused for all thread blocks that a host thread runs.
    pub fn new(id: usize, launch: &Launch) -> Self {
        let registers = &launch.function.registers;
        let mut warp = Self {
            id,
            state: State::Ready,
            live: 0,
            parked: 0,
            spinning: 0,
            place: [0; LANES],
            predicates: vec![0; registers.predicates],
            words: vec![[0; LANES]; registers.words],
            doubles: vec![[0; LANES]; registers.doubles],
            local: vec![POISON; launch.function.local_bytes * LANES],
            clock: Clock::new(id, launch.warps() + 1),
            copies: Copies::default(),
            products: VecDeque::new(),
            stores: VecDeque::new(),
        };
        for (register, value) in registers.constants() {
            for lane in 0..LANES {
                warp.set(register, lane, value);
            }
        }
        warp
    }

    /// Resets the warp to its state at the start of a thread block.
    pub fn start(&mut self, launch: &Launch, cube: [u32; 3]) {
        let lanes = (launch.threads() - self.id * LANES).min(LANES);
        self.state = State::Ready;
        self.live = ALL >> (LANES - lanes);
        (self.parked, self.spinning) = (0, 0);
        self.place = [0; LANES];
        self.local.fill(POISON);
        self.clock.reset();
        self.copies.clear();
        self.products = VecDeque::from([Vec::new()]);
        self.stores = VecDeque::from([Vec::new()]);
        for (register, special) in launch.function.registers.specials() {
            for lane in 0..LANES {
                let value = self.special(special, launch, cube, lane as u32);
                self.set(register, lane, value.into());
            }
        }
    }

    fn special(&self, special: Special, launch: &Launch, cube: [u32; 3], lane: u32) -> u32 {
        let thread = (self.id * LANES) as u32 + lane;
        let size = launch.cube_size;
        let below = (1 << lane) - 1;
        let own = 1 << lane;
        match special {
            Special::Thread(0) => thread % size[0],
            Special::Thread(1) => thread / size[0] % size[1],
            Special::Thread(_) => thread / (size[0] * size[1]),
            Special::CubeSize(axis) => size[axis],
            Special::Cube(axis) => cube[axis],
            Special::GridSize(axis) => launch.grid[axis],
            Special::Lane => lane,
            Special::Warp => self.id as u32,
            Special::LanesBelow => below,
            Special::LanesUpTo => below | own,
            Special::LanesAbove => !(below | own),
            Special::LanesFrom => !below,
            Special::OwnLane => own,
        }
    }

    /// Returns the group of lanes at the lowest instruction index among the lanes that do not wait. Returns `None` if
    /// all lanes wait for other lanes.
    pub fn next_group(&mut self) -> Option<Group> {
        let mut ready = self.live & !self.parked & !self.spinning;
        if ready == 0 {
            self.spinning = 0;
            ready = self.live & !self.parked;
        }
        let at = lanes(ready).map(|lane| self.place[lane]).min()?;
        let (mut mask, mut others) = (0, u32::MAX);
        for lane in lanes(self.live) {
            match self.place[lane] {
                place if place == at => mask |= 1 << lane,
                place if place > at => others = others.min(place),
                _ => {}
            }
        }
        self.parked &= !mask;
        Some(Group { at, mask, others })
    }

    /// Sets the next instruction of the lanes in `mask` to `at`.
    pub fn place(&mut self, mask: u32, at: u32) {
        for lane in lanes(mask) {
            self.place[lane] = at;
        }
    }

    /// Returns the index of a lane's next instruction.
    pub fn place_of(&self, lane: usize) -> u32 {
        self.place[lane]
    }

    /// Returns the mask of the lanes for which a condition is true.
    pub fn holds(&self, condition: Guard) -> u32 {
        let row = self.predicates[condition.predicate as usize];
        if condition.negated { !row } else { row }
    }

    pub fn get(&self, register: Register, lane: usize) -> u64 {
        match register {
            Register::Predicate(row) => (self.predicates[row as usize] >> lane & 1).into(),
            Register::Word(row) => self.words[row as usize][lane].into(),
            Register::Double(row) => self.doubles[row as usize][lane],
        }
    }

    pub fn set(&mut self, register: Register, lane: usize, value: u64) {
        match register {
            Register::Predicate(row) => {
                let row = &mut self.predicates[row as usize];
                *row = *row & !(1 << lane) | ((value & 1) as u32) << lane;
            }
            Register::Word(row) => self.words[row as usize][lane] = value as u32,
            Register::Double(row) => self.doubles[row as usize][lane] = value,
        }
    }

    /// Returns the values of a register of any class in all lanes, widened to 64 bits.
    pub fn row(&self, register: Register) -> DoubleRow {
        match register {
            Register::Double(row) => self.doubles[row as usize],
            Register::Word(row) => self.words[row as usize].map(u64::from),
            Register::Predicate(_) => std::array::from_fn(|lane| self.get(register, lane)),
        }
    }

    /// Sets the values of a register of any class for the lanes in `mask`.
    pub fn set_row(&mut self, register: Register, values: &DoubleRow, mask: u32) {
        match register.class() {
            Class::Double if mask == ALL => {
                if let Register::Double(row) = register {
                    self.doubles[row as usize] = *values;
                }
            }
            _ => {
                for lane in lanes(mask) {
                    self.set(register, lane, values[lane]);
                }
            }
        }
    }

    /// Returns the value of a register in the first lane of `mask`. PTX requires some operands to be equal in all
    /// lanes, and this function reads such operands.
    pub fn first_word(&self, row: u32, mask: u32) -> u32 {
        self.words[row as usize][mask.trailing_zeros() as usize % LANES]
    }
}
