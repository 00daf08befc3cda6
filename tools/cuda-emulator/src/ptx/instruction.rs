//! Decoded instructions: operations on rows of registers. A row has one value per lane. The class of a row is the kind of
//! its values, such as 32-bit words or predicates. A frequent operation takes rows of a fixed class and has its own loop
//! over all lanes.

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

/// The operations with 32-bit words as operands and as the result.
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
    /// Rounds two f32 values to bf16, and packs them into one word. The second operand goes to the low 16 bits.
    /// `PairHalf` rounds to f16 instead.
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
    /// Shifts a double (64 bits) left by the number of bits in a word (32 bits).
    ShiftLeft,
    /// Shifts a double (64 bits) right by the number of bits in a word (32 bits).
    ShiftRight,
    /// Multiplies two 32-bit words to a 64-bit double.
    MultiplyWide,
    MultiplyWideSigned,
    /// Multiplies two 32-bit words to a 64-bit double, and adds a double to the product.
    MultiplyAddWide,
    MultiplyAddWideSigned,
    /// Extends a 32-bit word to a 64-bit double.
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

/// The logical operations on predicates.
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
    /// The predicate that receives the second result, which is the negated comparison. `None` if the instruction has no
    /// second result. `combined` may hold a logical operation and a condition. The operation then combines each of the
    /// two results with this condition.
    pub opposite: Option<u32>,
    pub combined: Option<(Logic, Guard)>,
}

/// A load or a store of one or more registers, whose values are consecutive in memory.
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

/// A shuffle of 32-bit words among the lanes of a warp. All registers are rows of words, except the predicate `found`.
#[derive(Debug)]
pub struct Shuffle {
    pub mode: ShuffleMode,
    pub to: u32,
    /// The predicate that tells whether the source lane lies in the same segment as the lane that reads from it. `None`
    /// if the program ignores this result.
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
    /// True if the instruction tests whether the values of all lanes are equal. False if the instruction gives each
    /// lane a mask of the lanes whose value equals its own.
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

/// The instruction `ldmatrix` or `stmatrix`, with tiles of 8 × 8 halves (16-bit floats).
#[derive(Debug)]
pub struct MatrixAccess {
    pub transposed: bool,
    pub registers: Box<[u32]>,
    pub address: Address,
}

/// The instruction `mma.m16n8k8` or `mma.m16n8k16`, with matrices of halves (16-bit floats) and accumulators in f32.
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
    /// A 16-bit float, f16 or bf16.
    Half(Type),
    /// An f32 whose last 13 bits are ignored (tf32).
    Reduced,
    Single,
}

/// A tile in the registers of a warp. PTX does not specify which element of the tile lies in which register.
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
    /// True if each row is contiguous in memory, false if each column is contiguous.
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

/// The location of the left matrix of a `wgmma`: registers or shared memory.
#[derive(Debug)]
pub enum Left {
    Registers([u32; 4]),
    /// The index of the register that holds the shared memory descriptor of the left matrix.
    Shared(u32),
}

/// The instruction `wgmma.mma_async.m64nNk16`, with matrices of halves (16-bit floats) and accumulators in f32.
#[derive(Debug)]
pub struct Wgmma {
    pub half: Type,
    /// The registers of the accumulators, four for every eight columns.
    pub sums: Box<[u32]>,
    pub left: Left,
    /// The index of the register that holds the shared memory descriptor of the right matrix.
    pub right: u32,
    /// True if the right matrix is stored transposed.
    pub transposed: bool,
    /// The condition under which the product is added to the accumulators. If the condition is false, the product
    /// replaces the accumulators.
    pub accumulates: Guard,
}

/// The instruction `cp.async`, an asynchronous copy to shared memory by a lane.
#[derive(Debug)]
pub struct CopyAsync {
    pub target: Address,
    pub source: Address,
    pub bytes: usize,
    /// The register with the number of bytes to read from the source, or `None` if all bytes are read. The remaining
    /// bytes of the target are set to 0.
    pub read: Option<u32>,
}

#[derive(Debug)]
pub struct MbarrierArrive {
    pub to: Option<Register>,
    pub address: Address,
    pub arrivals: u32,
    /// The register that holds a number of bytes, for which the current phase then waits in addition. `None` if the
    /// instruction announces no bytes.
    pub bytes: Option<u32>,
}

#[derive(Debug)]
pub struct MbarrierWait {
    pub to: u32,
    pub address: Address,
    pub state: Register,
    /// True if `state` is the parity of a phase, false if `state` is the value that an arrival returned.
    pub parity: bool,
}

/// A TMA copy of one box of a tensor to or from shared memory. A tensor map describes the tensor.
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
    /// An instruction without an effect in the emulator, such as a hint to the assembler or some of the fences.
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
    /// An operation with a 64-bit result. Depending on the operation, the source registers have 32 or 64 bits.
    Doubles {
        operation: DoubleOperation,
        to: u32,
        from: [u32; 3],
    },
    /// Writes the low 32 bits of a double to a word.
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
    /// Writes the value `truth` to a word if the comparison is true, and otherwise writes 0.
    SetWord {
        compare: Box<Compare>,
        truth: u32,
        to: u32,
    },
    /// Compares the two halves of one word with the two halves of another word, as 16-bit floats of type `number`.
    /// Each comparison writes one half of the result: the 16 bits `truth` if the comparison is true, else 0.
    SetHalves {
        comparison: Comparison,
        number: Type,
        truth: u32,
        to: u32,
        from: [Register; 2],
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
    /// Converts an address of a memory space to a generic address by adding `offset`. If `offset` is negative, the
    /// operation instead converts a generic address to an address of a memory space.
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
    /// Arrives at an mbarrier once all `cp.async` copies that the lane has started are complete.
    CopyArrive {
        address: Address,
        /// True if the instruction also adds 1 to the number of arrivals for which the mbarrier's current phase waits.
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
