//! The shared memory of a thread block, with race detection. For each 32-bit word, the module records the last write, the
//! reads since that write, and the pending copies and `wgmma` instructions that access the word.

use super::clock::Clock;
use super::warp::POISON;
use crate::fault::Fault;
use crate::ptx::SHARED_START;

const WORD: usize = 4;

/// The number of words in a page. Before a thread block starts, only the pages that the previous block has touched are reset.
const PAGE: usize = 256;

/// The value of `writer` in the record of a word that no actor has written.
const NOBODY: u16 = u16::MAX;

#[derive(Clone, Copy)]
struct Word {
    written: u32,
    writer: u16,
    /// The number of pending copies that will write this word.
    coming: u16,
    /// The number of pending `wgmma` instructions and copies that read this word.
    leaving: u16,
    /// The actor that most recently started an asynchronous read of this word, among the reads that are pending.
    reader: u16,
    /// True if the last write was atomic. Atomic operations of other actors may then follow in any order without a
    /// race.
    atomic: bool,
}

const UNTOUCHED: Word = Word {
    written: 0,
    writer: NOBODY,
    coming: 0,
    leaving: 0,
    reader: NOBODY,
    atomic: false,
};

/// A data race: two accesses to the same bytes that no barrier orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Race {
    pub what: &'static str,
    pub byte: usize,
    /// The actor of the earlier access: the index of a warp, or the number of warps for TMA loads.
    pub other: usize,
}

pub struct SharedMemory {
    bytes: Vec<u8>,
    words: Vec<Word>,
    /// The times of reads, indexed as `[actor, word]`. An entry is the time at which the actor last read the word,
    /// counting only reads since the last write to the word.
    reads: Vec<u32>,
    actors: usize,
    /// One time for each actor. Writes of the actor up to this time are visible to the async proxy (TMA copies and
    /// `wgmma`).
    fenced: Vec<u32>,
    touched: Vec<bool>,
    pub races: Vec<Race>,
}

impl SharedMemory {
    /// Creates the shared memory for `actors` actors: one per warp, and one for all TMA loads.
    pub fn new(bytes: usize, actors: usize) -> Self {
        let words = bytes.div_ceil(WORD);
        Self {
            bytes: vec![POISON; words * WORD],
            words: vec![UNTOUCHED; words],
            reads: vec![0; words * actors],
            actors,
            fenced: vec![0; actors],
            touched: vec![false; words.div_ceil(PAGE)],
            races: Vec::new(),
        }
    }

    /// Resets the memory and its records before a thread block starts.
    pub fn reset(&mut self) {
        let count = self.words.len();
        for (page, touched) in self.touched.iter_mut().enumerate() {
            if !std::mem::take(touched) {
                continue;
            }
            let words = page * PAGE..((page + 1) * PAGE).min(count);
            self.bytes[words.start * WORD..words.end * WORD].fill(POISON);
            self.words[words.clone()].fill(UNTOUCHED);
            for actor in 0..self.actors {
                self.reads[actor * count..][words.clone()].fill(0);
            }
        }
        self.fenced.fill(0);
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bytes of the shared memory for a write that the caller has already checked and recorded.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Returns the offset in this memory that corresponds to a shared memory address.
    ///
    /// # Errors
    /// Returns an error if some of the bytes are outside of this memory.
    pub fn offset(&self, address: u64, bytes: usize) -> Result<usize, Fault> {
        match address.checked_sub(SHARED_START) {
            Some(at)
                if at <= self.bytes.len() as u64
                    && bytes as u64 <= self.bytes.len() as u64 - at =>
            {
                Ok(at as usize)
            }
            _ => Err(Fault::OutOfBounds {
                memory: "shared memory",
                address,
                bytes,
            }),
        }
    }

    fn tell(&mut self, what: &'static str, word: usize, other: usize) {
        let byte = word * WORD;
        self.races.push(Race { what, byte, other });
    }

    fn words_of(&mut self, at: usize, bytes: usize) -> std::ops::Range<usize> {
        let words = at / WORD..(at + bytes).div_ceil(WORD);
        for page in words.start / PAGE..words.end.div_ceil(PAGE) {
            self.touched[page] = true;
        }
        words
    }

    /// Checks that the last writes of these bytes happened before this read by a warp, and records the read.
    pub fn reading(&mut self, clock: &Clock, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        let (owner, now) = (clock.owner(), clock.now());
        let own = owner * self.words.len();
        let reads = &self.reads[own..][words.clone()];
        // If this warp has read all of these words at its current time, with no write since then, the check is skipped.
        if reads.iter().all(|read| *read == now) {
            return;
        }
        for index in words.clone() {
            let word = self.words[index];
            if word.coming > 0 {
                return self.tell(
                    "a read of bytes that a copy has yet to bring",
                    index,
                    word.writer.into(),
                );
            }
            if !is_known(word, clock) {
                return self.tell("a read after a write", index, word.writer.into());
            }
        }
        self.reads[own..][words].fill(now);
    }

    /// Checks that the last reads and writes of these bytes happened before this write by a warp.
    pub fn writing(&mut self, clock: &Clock, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        for index in words.clone() {
            let word = self.words[index];
            if word.coming > 0 {
                return self.tell(
                    "a write where a copy is on its way",
                    index,
                    word.writer.into(),
                );
            }
            if word.leaving > 0 {
                let what = "a write to bytes that a product or a copy is reading";
                return self.tell(what, index, word.reader.into());
            }
            // A write of less than a word is not checked, because the last access may have been to neighboring bytes of
            // the word.
            if bytes >= WORD && !is_known(word, clock) {
                return self.tell("a write after a write", index, word.writer.into());
            }
        }
        self.check_reads(clock, words);
    }

    /// Checks that all reads of these words by other actors happened before this warp's write.
    fn check_reads(&mut self, clock: &Clock, words: std::ops::Range<usize>) {
        let owner = clock.owner();
        for (other, known) in clock.times().iter().enumerate() {
            let reads = &self.reads[other * self.words.len()..][words.clone()];
            if other != owner && reads.iter().any(|read| read > known) {
                return self.tell("a write after a read", words.start, other);
            }
        }
    }

    /// Records that an actor has written these bytes.
    pub fn written(&mut self, actor: usize, time: u32, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words.clone()] {
            word.writer = actor as u16;
            word.written = time;
            word.atomic = false;
        }
        for actor in 0..self.actors {
            self.reads[actor * self.words.len()..][words.clone()].fill(0);
        }
    }

    /// Checks, records and performs a write by a warp. A race does not prevent the write.
    pub fn write(&mut self, clock: &Clock, at: usize, data: &[u8]) {
        self.writing(clock, at, data.len());
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.written(clock.owner(), clock.now(), at, data.len());
    }

    /// Checks that an atomic operation of a warp on these bytes causes no race, and records the operation.
    pub fn changing(&mut self, clock: &Clock, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        if self.words[words.clone()].iter().all(|word| word.atomic) {
            self.check_reads(clock, words.clone());
        } else {
            self.reading(clock, at, bytes);
            self.writing(clock, at, bytes);
        }
        self.written(clock.owner(), clock.now(), at, bytes);
        for word in &mut self.words[words] {
            word.atomic = true;
        }
    }

    /// Records that a warp starts an asynchronous copy to these bytes. Until the copy is completed, the copy may write
    /// the bytes at any time.
    pub fn copy_starts(&mut self, clock: &Clock, at: usize, bytes: usize) {
        self.writing(clock, at, bytes);
        self.bytes[at..at + bytes].fill(POISON);
        self.written(clock.owner(), clock.now(), at, bytes);
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words] {
            word.coming += 1;
        }
    }

    /// Completes an asynchronous copy. If `data` is shorter than `bytes`, the remaining bytes are set to zero.
    pub fn copy_ends(&mut self, actor: usize, time: u32, at: usize, bytes: usize, data: &[u8]) {
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words] {
            word.coming -= 1;
        }
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.bytes[at + data.len()..at + bytes].fill(0);
        self.written(actor, time, at, bytes);
    }

    /// Records the start of an asynchronous read by `wgmma` or a TMA store. Such a read runs concurrently with the
    /// warp's own loads and stores.
    pub fn read_starts(&mut self, clock: &Clock, at: usize, bytes: usize) {
        self.reading(clock, at, bytes);
        let words = self.words_of(at, bytes);
        let copies = self.actors - 1;
        let unfenced = words.clone().find(|index| {
            let word = self.words[*index];
            let writer = usize::from(word.writer);
            word.writer != NOBODY && writer != copies && word.written > self.fenced[writer]
        });
        if let Some(index) = unfenced {
            let what = "a product or a copy of a write with no proxy fence between";
            self.tell(what, index, self.words[index].writer.into());
        }
        for word in &mut self.words[words] {
            word.reader = clock.owner() as u16;
            word.leaving += 1;
        }
    }

    /// Records the end of an asynchronous read.
    pub fn read_ends(&mut self, clock: &Clock, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words.clone()] {
            word.leaving -= 1;
        }
        self.reads[clock.owner() * self.words.len()..][words].fill(clock.now());
    }

    /// Applies a proxy fence of a warp. `clock` is the vector clock of that warp. All writes that happened before the fence,
    /// according to this clock, become visible to TMA copies and `wgmma`.
    pub fn fence(&mut self, clock: &mut Clock) {
        super::clock::join(&mut self.fenced, clock.times());
        clock.tick();
    }
}

/// Returns true if the warp's next access cannot race with the last write to the word. There is no race if the write is the
/// warp's own, if the write happened before the access, or if no actor has written the word.
fn is_known(word: Word, clock: &Clock) -> bool {
    let writer = usize::from(word.writer);
    word.writer == NOBODY || writer == clock.owner() || clock.knows(writer, word.written)
}
