//! Instructions as they run: operations on rows of registers. Those that kernels run most name rows of one class and have a loop
//! over lanes each; the others are computed lane by lane.

use super::types::{Register, Type};
use crate::numbers::{Arithmetic, Comparison, Conversion};

/// A predicate, or its opposite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    pub predicate: u32,
    pub negated: bool,
}

#[derive(Debug)]
pub struct Instruction {
    /// The lanes that it is for, if not all.
    pub guard: Option<Guard>,
    pub operation: Operation,
}

/// An address: a register, if one is named, and an offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub base: Option<Register>,
    pub offset: u64,
}

/// Of words to a word.
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
    /// Two halves from two floats; the second is the low one.
    PairBrain,
    PairHalf,
}

/// To a double.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoubleOperation {
    Move,
    Add,
    Subtract,
    Multiply,
    MultiplyAdd,
    And,
    Or,
    /// By a word.
    ShiftLeft,
    /// By a word.
    ShiftRight,
    /// Of words.
    MultiplyWide,
    MultiplyWideSigned,
    /// Of words, plus a double.
    MultiplyAddWide,
    MultiplyAddWideSigned,
    /// Of a word.
    Widen,
    WidenSigned,
}

/// Of words.
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
    /// Also where one is no number.
    NotEqualFloat,
    LessFloat,
    LessOrEqualFloat,
    GreaterFloat,
    GreaterOrEqualFloat,
}

/// Of predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    Move,
    And,
    Or,
    Xor,
    Not,
}

/// A comparison of any type, with what is made of its result.
#[derive(Debug)]
pub struct Compare {
    pub comparison: Comparison,
    pub number: Type,
    pub from: [Register; 2],
    pub to: u32,
    /// The opposite result, combined likewise.
    pub opposite: Option<u32>,
    pub combined: Option<(Logic, Guard)>,
}

/// A load or a store of one or several registers that lie side by side.
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
    /// Up to the operand, then 0.
    Increment,
    /// From the operand down to 0, then again.
    Decrement,
}

#[derive(Debug)]
pub struct Atomic {
    pub space: super::Space,
    pub number: Type,
    pub operation: AtomicOperation,
    /// Where the old value goes, if it is asked for.
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

/// Rows of words, but for `found`.
#[derive(Debug)]
pub struct Shuffle {
    pub mode: ShuffleMode,
    pub to: u32,
    /// Whether the lane asked for was in its segment.
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
    /// Whether all must have one value.
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

/// `ldmatrix` and `stmatrix` of 8 × 8 halves.
#[derive(Debug)]
pub struct MatrixAccess {
    pub transposed: bool,
    pub registers: Box<[u32]>,
    pub address: Address,
}

/// `mma.m16n8k8` and `.m16n8k16` of halves, with sums in f32.
#[derive(Debug)]
pub struct Mma {
    pub half: Type,
    pub to: [u32; 4],
    pub left: Box<[u32]>,
    pub right: Box<[u32]>,
    pub sums: [u32; 4],
}

/// What a fragment of `wmma` has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// A half of this type.
    Half(Type),
    /// An f32 without its last 13 bits (tf32).
    Reduced,
    Single,
}

/// A tile as a warp has it.
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
    /// Whether rows lie side by side in memory, or columns.
    pub by_rows: bool,
    pub space: super::Space,
    pub address: Address,
    /// Elements from one to the next; none lie between if it is not said.
    pub stride: Option<u32>,
}

#[derive(Debug)]
pub struct Wmma {
    pub to: Fragment,
    pub left: Fragment,
    pub right: Fragment,
    pub sums: Fragment,
}

/// Where a product's left operand is.
#[derive(Debug)]
pub enum Left {
    Registers([u32; 4]),
    /// The row of a descriptor of shared memory.
    Shared(u32),
}

/// `wgmma.mma_async.m64nNk16` of halves, with sums in f32.
#[derive(Debug)]
pub struct Wgmma {
    pub half: Type,
    /// Four for eight columns.
    pub sums: Box<[u32]>,
    pub left: Left,
    /// The row of a descriptor of shared memory.
    pub right: u32,
    /// Whether the right operand's rows are its columns.
    pub transposed: bool,
    /// Whether the sums go on, or start at 0.
    pub accumulates: Guard,
}

/// `cp.async`.
#[derive(Debug)]
pub struct CopyAsync {
    pub target: Address,
    pub source: Address,
    pub bytes: usize,
    /// How many of the bytes are read; the others are 0.
    pub read: Option<u32>,
}

#[derive(Debug)]
pub struct MbarrierArrive {
    pub to: Option<Register>,
    pub address: Address,
    pub arrivals: u32,
    /// Bytes that copies will bring.
    pub bytes: Option<u32>,
}

#[derive(Debug)]
pub struct MbarrierWait {
    pub to: u32,
    pub address: Address,
    pub state: Register,
    /// Whether the state is a phase's parity, or what an arrival gave.
    pub parity: bool,
}

/// A copy of a tensor map's box, to or from shared memory.
#[derive(Debug)]
pub struct TensorCopy {
    pub shared: Address,
    pub map: Register,
    pub place: Box<[u32]>,
    /// Of a load: the barrier that is told.
    pub barrier: Option<Address>,
}

#[derive(Debug)]
pub enum Operation {
    /// Advice, and fences that nothing here needs.
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
    /// Rows of doubles, and of words where the operation says so.
    Doubles {
        operation: DoubleOperation,
        to: u32,
        from: [u32; 3],
    },
    /// The low half of a double.
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
    /// 1, or all bits, where it holds, else 0.
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
    /// Several registers side by side in one.
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
    /// To a generic address, or back with `offset` negative.
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
    /// Until so many groups are left.
    WgmmaWait(usize),

    CopyAsync(Box<CopyAsync>),
    CopyCommit,
    /// Until so many groups are left.
    CopyWait(usize),
    CopyWaitAll,
    /// Arrives at a barrier when the lane's copies have.
    CopyArrive {
        address: Address,
        /// Whether the barrier counts one arrival more for it.
        expected: bool,
    },
    TensorLoad(Box<TensorCopy>),
    TensorStore(Box<TensorCopy>),
    BulkCommit,
    /// Until so many groups are left.
    BulkWait(usize),
    /// What was written is seen by copies of boxes and by products of warpgroups.
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
