//! A cube's shared memory, which tells of accesses that nothing orders. Of every word it knows who wrote it last and when, who read it
//! since, and whether a copy to it or a product that reads it is on its way.

use super::clock::Clock;
use super::warp::POISON;
use crate::fault::Fault;
use crate::ptx::SHARED_START;

const WORD: usize = 4;

/// What is cleared at once, in words.
const PAGE: usize = 256;

/// Nobody.
const NOBODY: u16 = u16::MAX;

#[derive(Clone, Copy)]
struct Word {
    written: u32,
    writer: u16,
    /// Copies on their way here.
    coming: u16,
    /// Products and copies on their way that read this.
    leaving: u16,
    /// Whose the last of these is.
    reader: u16,
    /// Whether the last write was an atomic's, which others' atomics may follow in any order.
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

/// Two accesses of which either may be first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Race {
    pub what: &'static str,
    pub byte: usize,
    /// The other warp; the number of warps stands for copies.
    pub other: usize,
}

pub struct SharedMemory {
    bytes: Vec<u8>,
    words: Vec<Word>,
    /// When each actor read each word since it was written; actor by actor.
    reads: Vec<u32>,
    actors: usize,
    /// Of each actor, up to when its writes are seen by copies of boxes and by products.
    fenced: Vec<u32>,
    touched: Vec<bool>,
    pub races: Vec<Race>,
}

impl SharedMemory {
    /// For so many actors: the warps, and one for copies.
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

    /// As it is before a cube starts.
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

    /// The bytes, for writes that have been told of.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Where an address is among the bytes.
    ///
    /// # Errors
    /// Bytes that are not all in this memory.
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

    /// Looks whether a warp may read these bytes now.
    pub fn reading(&mut self, clock: &Clock, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        let (owner, now) = (clock.owner(), clock.now());
        let own = owner * self.words.len();
        let reads = &self.reads[own..][words.clone()];
        // Nobody has written since it was looked at last.
        if reads.iter().all(|read| *read == now) {
            return;
        }
        for index in words.clone() {
            let word = self.words[index];
            if word.coming > 0 {
                return self.tell(
                    "a read of what a copy has yet to bring",
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

    /// Looks whether a warp may write these bytes now.
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
                let what = "a write to what a product or a copy is reading";
                return self.tell(what, index, word.reader.into());
            }
            // Neighbours in a word may be two warps'.
            if bytes >= WORD && !is_known(word, clock) {
                return self.tell("a write after a write", index, word.writer.into());
            }
        }
        self.check_reads(clock, words);
    }

    /// Looks whether others have read what a warp is about to change.
    fn check_reads(&mut self, clock: &Clock, words: std::ops::Range<usize>) {
        let owner = clock.owner();
        for (other, known) in clock.times().iter().enumerate() {
            let reads = &self.reads[other * self.words.len()..][words.clone()];
            if other != owner && reads.iter().any(|read| read > known) {
                return self.tell("a write after a read", words.start, other);
            }
        }
    }

    /// Says that an actor has written these bytes.
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

    /// Writes for a warp, which may be a race.
    pub fn write(&mut self, clock: &Clock, at: usize, data: &[u8]) {
        self.writing(clock, at, data.len());
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.written(clock.owner(), clock.now(), at, data.len());
    }

    /// Looks whether a warp may change these bytes atomically, and says that it does.
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

    /// A copy by a warp starts, which may come at any time from now.
    pub fn copy_starts(&mut self, clock: &Clock, at: usize, bytes: usize) {
        self.writing(clock, at, bytes);
        self.bytes[at..at + bytes].fill(POISON);
        self.written(clock.owner(), clock.now(), at, bytes);
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words] {
            word.coming += 1;
        }
    }

    /// A copy has come; `data` may be shorter than what it covers, and zeros follow it.
    pub fn copy_ends(&mut self, actor: usize, time: u32, at: usize, bytes: usize, data: &[u8]) {
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words] {
            word.coming -= 1;
        }
        self.bytes[at..at + data.len()].copy_from_slice(data);
        self.bytes[at + data.len()..at + bytes].fill(0);
        self.written(actor, time, at, bytes);
    }

    /// Something that a warp started reads these bytes from now on, past its own loads and stores.
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
            let what = "a product or a copy of what no proxy fence has shown it";
            self.tell(what, index, self.words[index].writer.into());
        }
        for word in &mut self.words[words] {
            word.reader = clock.owner() as u16;
            word.leaving += 1;
        }
    }

    /// It has read them.
    pub fn read_ends(&mut self, clock: &Clock, at: usize, bytes: usize) {
        let words = self.words_of(at, bytes);
        for word in &mut self.words[words.clone()] {
            word.leaving -= 1;
        }
        self.reads[clock.owner() * self.words.len()..][words].fill(clock.now());
    }

    /// What the warp knows to be written, copies of boxes and products see.
    pub fn fence(&mut self, clock: &mut Clock) {
        super::clock::join(&mut self.fenced, clock.times());
        clock.tick();
    }
}

/// Whether the last write is the warp's own, or one that it knows of.
fn is_known(word: Word, clock: &Clock) -> bool {
    let writer = usize::from(word.writer);
    word.writer == NOBODY || writer == clock.owner() || clock.knows(writer, word.written)
}
