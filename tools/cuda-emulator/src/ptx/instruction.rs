//! Decoded instructions: operations on rows of registers. A row has one value per lane. A frequent operation takes rows
//! of a fixed class and has its own loop over all lanes. Any other operation is computed lane by lane.

use super::types::{Register, Type};
use crate::numbers::{Arithmetic, Comparison, Conversion};

/// The condition of an instruction: a predicate or its negation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    pub predicate: u32,
    pub negated: bool,
}

#[derive(Debug)]
pub struct Instruction {
    /// The condition under which a lane executes the instruction, or `None` if all lanes execute it.
    pub guard: Option<Guard>,
    pub operation: Operation,
}

/// An address: the sum of an optional register and a constant offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub base: Option<Register>,
    pub offset: u64,
}

/// The operations with 32-bit words as operands and result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOperation {
    Move,
    Add,
    Subtract,
    Multiply,
    MultiplyAdd,
    MultiplyHigh,
    And,
    Or,
    Xor,
    Not,
    ShiftLeft,
    ShiftRight,
    ShiftRightSigned,
    Min,
    Max,
    MinSigned,
    MaxSigned,
    AddFloat,
    SubtractFloat,
    MultiplyFloat,
    MultiplyAddFloat,
    MinFloat,
    MaxFloat,
    NegateFloat,
    AbsoluteFloat,
    Exponential,
    ToFloat,
    ToFloatSigned,
    /// Packs two f32 values as bf16 or f16. The second operand goes to the low 16 bits.
    PairBrain,
    PairHalf,
}

/// The operations with a double (a 64-bit value) as the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoubleOperation {
    Move,
    Add,
    Subtract,
    Multiply,
    MultiplyAdd,
    And,
    Or,
    /// Shifts a double by a word.
    ShiftLeft,
    /// Shifts a double by a word.
    ShiftRight,
    /// Multiplies two words to a double.
    MultiplyWide,
    MultiplyWideSigned,
    /// Multiplies two words to a double, and adds a double.
    MultiplyAddWide,
    MultiplyAddWideSigned,
    /// Extends a word to a double.
    Widen,
    WidenSigned,
}

/// The comparisons of two 32-bit words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordComparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    LessSigned,
    LessOrEqualSigned,
    GreaterSigned,
    GreaterOrEqualSigned,
    EqualFloat,
    /// True if the operands differ, or if an operand is NaN.
    NotEqualFloat,
    LessFloat,
    LessOrEqualFloat,
    GreaterFloat,
    GreaterOrEqualFloat,
}

/// The operations on predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    Move,
    And,
    Or,
    Xor,
    Not,
}

/// A comparison of values of any type, and the destination of its result.
#[derive(Debug)]
pub struct Compare {
    pub comparison: Comparison,
    pub number: Type,
    pub from: [Register; 2],
    pub to: u32,
    /// The predicate that receives the negated result, combined with the other predicate in the same way.
    pub opposite: Option<u32>,
    pub combined: Option<(Logic, Guard)>,
}

/// A load to, or a store from, one or more registers that are consecutive in memory.
#[derive(Debug)]
pub struct Access {
    pub space: super::Space,
    pub number: Type,
    pub registers: Box<[Register]>,
    pub address: Address,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOperation {
    Arithmetic(Arithmetic),
    Exchange,
    CompareAndSwap,
    /// Increments the old value. If the old value is at least the operand, stores 0 instead.
    Increment,
    /// Decrements the old value. If the old value is 0 or exceeds the operand, stores the operand instead.
    Decrement,
}

#[derive(Debug)]
pub struct Atomic {
    pub space: super::Space,
    pub number: Type,
    pub operation: AtomicOperation,
    /// The register that receives the old value, or `None` if the program ignores it.
    pub to: Option<Register>,
    pub address: Address,
    pub operands: [Register; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// A shuffle of 32-bit words. All registers are rows of words, except the predicate `found`.
#[derive(Debug)]
pub struct Shuffle {
    pub mode: ShuffleMode,
    pub to: u32,
    /// The predicate that is set to true if the lane from which to read is in the same segment.
    pub found: Option<u32>,
    pub value: u32,
    pub lane: u32,
    pub segment: u32,
    pub members: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VoteMode {
    Any,
    All,
    Uniform,
    Ballot,
}

#[derive(Debug)]
pub struct Vote {
    pub mode: VoteMode,
    pub to: Register,
    pub condition: Guard,
    pub members: u32,
}

#[derive(Debug)]
pub struct Match {
    /// True if the match requires that all lanes have the same value, false if each lane gets the mask of its equals.
    pub all: bool,
    pub to: u32,
    pub agree: Option<u32>,
    pub value: Register,
    pub members: u32,
}

#[derive(Debug)]
pub struct Reduce {
    pub arithmetic: Arithmetic,
    pub to: u32,
    pub value: u32,
    pub members: u32,
}

/// The instruction `ldmatrix` or `stmatrix`, with tiles of 8 × 8 halves.
#[derive(Debug)]
pub struct MatrixAccess {
    pub transposed: bool,
    pub registers: Box<[u32]>,
    pub address: Address,
}

/// The instruction `mma.m16n8k8` or `mma.m16n8k16`, with matrices of halves and accumulators in f32.
#[derive(Debug)]
pub struct Mma {
    pub half: Type,
    pub to: [u32; 4],
    pub left: Box<[u32]>,
    pub right: Box<[u32]>,
    pub sums: [u32; 4],
}

/// The element type of a `wmma` fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// A 16-bit float of this type.
    Half(Type),
    /// An f32 whose last 13 bits are ignored (tf32).
    Reduced,
    Single,
}

/// A tile in the registers of a warp, with an opaque layout.
#[derive(Debug)]
pub struct Fragment {
    pub element: Element,
    pub registers: Box<[u32]>,
    pub rows: usize,
    pub columns: usize,
}

#[derive(Debug)]
pub struct WmmaAccess {
    pub fragment: Fragment,
    /// True if the elements of a row are contiguous in memory, false if the elements of a column are.
    pub by_rows: bool,
    pub space: super::Space,
    pub address: Address,
    /// The register with the distance between two lines (rows or columns) in elements, or `None` if the lines are
    /// contiguous.
    pub stride: Option<u32>,
}

#[derive(Debug)]
pub struct Wmma {
    pub to: Fragment,
    pub left: Fragment,
    pub right: Fragment,
    pub sums: Fragment,
}

/// The location of the left matrix of a `wgmma`.
#[derive(Debug)]
pub enum Left {
    Registers([u32; 4]),
    /// The row of registers with the matrix's shared memory descriptor.
    Shared(u32),
}

/// The instruction `wgmma.mma_async.m64nNk16`, with matrices of halves and accumulators in f32.
#[derive(Debug)]
pub struct Wgmma {
    pub half: Type,
    /// The registers of the accumulators, four for every eight columns.
    pub sums: Box<[u32]>,
    pub left: Left,
    /// The row of registers with the right matrix's shared memory descriptor.
    pub right: u32,
    /// True if the right matrix is stored transposed.
    pub transposed: bool,
    /// True if the result is added to the accumulators, false if it replaces them.
    pub accumulates: Guard,
}

/// The instruction `cp.async`, an asynchronous copy to shared memory by a lane.
#[derive(Debug)]
pub struct CopyAsync {
    pub target: Address,
    pub source: Address,
    pub bytes: usize,
    /// The register with the number of bytes that are read. The remaining bytes of the target are set to 0. `None`
    /// reads all bytes.
    pub read: Option<u32>,
}

#[derive(Debug)]
pub struct MbarrierArrive {
    pub to: Option<Register>,
    pub address: Address,
    pub arrivals: u32,
    /// The register with the number of bytes that the current phase expects from copies, or `None` to announce no
    /// bytes.
    pub bytes: Option<u32>,
}

#[derive(Debug)]
pub struct MbarrierWait {
    pub to: u32,
    pub address: Address,
    pub state: Register,
    /// True if `state` is the parity of a phase, false if it is the state that an arrival returned.
    pub parity: bool,
}

/// A TMA copy of a box of a tensor map, to or from shared memory.
#[derive(Debug)]
pub struct TensorCopy {
    pub shared: Address,
    pub map: Register,
    pub place: Box<[u32]>,
    /// The mbarrier that counts the bytes of a load, or `None` for a store.
    pub barrier: Option<Address>,
}

#[derive(Debug)]
pub enum Operation {
    /// An instruction without an effect in the emulator, such as advice to the assembler, or some fences.
    Nothing,
    Branch(u32),
    Exit,
    Trap,
    Sleep,

    Words {
        operation: WordOperation,
        to: u32,
        from: [u32; 3],
    },
    /// An operation with a 64-bit result. The operation decides which of its source rows are words.
    Doubles {
        operation: DoubleOperation,
        to: u32,
        from: [u32; 3],
    },
    /// Writes the low half of a double to a word.
    Narrow {
        to: u32,
        from: u32,
    },
    CompareWords {
        comparison: WordComparison,
        to: u32,
        from: [u32; 2],
    },
    SelectWords {
        to: u32,
        from: [u32; 2],
        condition: Guard,
    },
    Predicates {
        logic: Logic,
        to: u32,
        from: [u32; 2],
    },
    Arithmetic {
        arithmetic: Arithmetic,
        to: Register,
        from: [Register; 4],
    },
    Compare(Box<Compare>),
    /// Writes `truth` to a word if the comparison is true, otherwise 0.
    SetWord {
        compare: Box<Compare>,
        truth: u32,
        to: u32,
    },
    Select {
        to: Register,
        from: [Register; 2],
        condition: Guard,
    },
    Convert {
        conversion: Conversion,
        to: Register,
        from: Register,
    },
    /// Packs several registers into one wider register.
    Pack {
        to: Register,
        from: Box<[Register]>,
    },
    Unpack {
        to: Box<[Register]>,
        from: Register,
    },
    Clock(Register),

    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    /// Converts an address to a generic one by adding `offset`. A negative `offset` converts a generic address back.
    ShiftAddress {
        to: u32,
        from: u32,
        offset: u64,
    },
    IsSpace {
        space: super::Space,
        to: u32,
        from: u32,
    },

    WarpBarrier {
        members: u32,
    },
    Shuffle(Box<Shuffle>),
    Vote(Box<Vote>),
    Match(Box<Match>),
    Reduce(Box<Reduce>),
    ActiveLanes(u32),
    Elect {
        to: u32,
        elected: u32,
        members: u32,
    },

    LoadMatrix(Box<MatrixAccess>),
    StoreMatrix(Box<MatrixAccess>),
    Mma(Box<Mma>),
    WmmaLoad(Box<WmmaAccess>),
    WmmaStore(Box<WmmaAccess>),
    Wmma(Box<Wmma>),
    Wgmma(Box<Wgmma>),
    WgmmaCommit,
    /// Waits until at most this number of `wgmma` groups are pending.
    WgmmaWait(usize),

    CopyAsync(Box<CopyAsync>),
    CopyCommit,
    /// Waits until at most this number of `cp.async` groups are pending.
    CopyWait(usize),
    CopyWaitAll,
    /// Arrives at an mbarrier once the lane's `cp.async` copies so far are complete.
    CopyArrive {
        address: Address,
        /// True if the mbarrier's current phase must expect one more arrival for this instruction.
        expected: bool,
    },
    TensorLoad(Box<TensorCopy>),
    TensorStore(Box<TensorCopy>),
    BulkCommit,
    /// Waits until at most this number of groups of TMA stores are pending.
    BulkWait(usize),
    /// Makes earlier writes visible to TMA copies and to `wgmma`.
    ProxyFence,

    Barrier {
        id: u32,
        threads: Option<u32>,
        waits: bool,
    },
    MbarrierInit {
        address: Address,
        arrivals: u32,
    },
    MbarrierInvalidate(Address),
    MbarrierArrive(Box<MbarrierArrive>),
    MbarrierWait(Box<MbarrierWait>),
}
