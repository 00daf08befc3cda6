//! Compiles the kernels of the cmma and unit engines for AMD's GPUs with CubeCL's compiler. The results are the code objects
//! that Burn's `rocm` backend loads.
//!
//! The compiler needs ROCm only for the tanh of a softcap, and this ROCm must have version 6.4 or later. If ROCm is not
//! in `/opt/rocm`, `CUBECL_ROCM_DEVICE_LIB_PATH` must name the folder of `ocml.bc`.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use super::{Library, OPTIONS, hot_spills, number_between, options, tempfolder, without};
use crate::process::{self, Result};

/// The resources of a GPU's compute unit, which limit the number of waves in flight. On RDNA, a workgroup processor counts as
/// the compute unit.
struct Card {
    architecture: &'static str,
    /// The number of registers per lane of a SIMD, and the granularity in which a wave gets registers. All waves of a
    /// SIMD share the registers.
    registers: [usize; 2],
    /// The maximum number of waves per SIMD.
    waves: usize,
    shared_memory: usize,
    /// The number of threads (CubeCL: units) per wave.
    wave: usize,
}

/// The number of SIMDs per compute unit.
const SIMDS: usize = 4;

const CARDS: &[Card] = &[
    Card::cdna("gfx90a"),
    Card::cdna("gfx942"),
    Card::rdna("gfx1100"),
    Card::rdna("gfx1201"),
];

impl Card {
    const fn cdna(architecture: &'static str) -> Self {
        Self {
            architecture,
            registers: [512, 8],
            waves: 8,
            shared_memory: 64 << 10,
            wave: 64,
        }
    }

    const fn rdna(architecture: &'static str) -> Self {
        Self {
            architecture,
            registers: [1536, 24],
            waves: 16,
            shared_memory: 128 << 10,
            wave: 32,
        }
    }

    /// Returns the number of waves per compute unit that a kernel's registers and shared memory allow. A cube runs only
    /// if all of its waves fit at the same time, so the function counts only the waves of whole cubes.
    fn waves(&self, kernel: &Compiled) -> usize {
        let [registers, granule] = self.registers;
        let by_registers = registers / kernel.registers.max(1).next_multiple_of(granule);
        let waves_of_cube = kernel.units.div_ceil(self.wave);
        let cubes_by_registers = SIMDS * by_registers.min(self.waves) / waves_of_cube;
        let cubes = cubes_by_registers.min(self.shared_memory / kernel.shared_memory.max(1));
        cubes * waves_of_cube
    }
}

const PASSES: &[&str] = &["forward", "backward", "decode"];

const WIDTHS: &[&str] = &["64-64", "128-128", "256-256", "512-512"];

const TABLE: &str = "docs/amd-compiled.md";

/// The compiler's results for one kernel on one GPU.
#[derive(Debug, PartialEq, Eq)]
struct Compiled {
    units: usize,
    shared_memory: usize,
    registers: usize,
    /// The scratch memory per unit in bytes. Scratch memory holds spilled registers, and arrays that do not fit into registers.
    scratch: usize,
    /// The number of spill instructions in loops with WMMA or FMA instructions. Spill instructions are accesses to scratch
    /// memory, and moves to or from accumulator registers (AGPRs).
    hot_spills: usize,
    /// The number of WMMA instructions, which multiply matrices.
    matrix_products: usize,
}

/// The results by kernel name and GPU architecture. If a kernel has no code for a GPU, the error says why.
type Kernels = BTreeMap<String, BTreeMap<&'static str, std::result::Result<Compiled, String>>>;

pub fn run() -> Result<()> {
    let tools = tools()?;
    let folder = tempfolder()?;
    let names = options(
        PASSES
            .iter()
            .flat_map(|pass| WIDTHS.iter().map(move |widths| format!("{pass}-{widths}"))),
    );
    let architectures: Vec<_> = CARDS.iter().map(|card| card.architecture).collect();
    let library = Library {
        feature: "rocm",
        test: "engine::portable::common::source::write",
    };
    library.write(&names, &folder, &[("CARDS", architectures.join(" "))])?;
    let mut kernels = Kernels::new();
    for card in CARDS {
        let folder = folder.join("kernels").join(card.architecture);
        for line in text_of(&folder.join("kernels.txt"))?.lines() {
            let (name, outcome) = read(&tools, &folder, line)?;
            let cards = kernels.entry(name).or_default();
            cards.insert(card.architecture, outcome);
        }
    }
    let table = table(&kernels);
    let path = process::workspace_root().join(TABLE);
    fs::write(&path, &table).map_err(|error| format!("{}: {error}", path.display()))?;
    println!("{table}");
    without(&folder)?;
    let on_units: Vec<_> = kernels
        .iter()
        .filter(|(name, _)| name.starts_with("cmma"))
        .flat_map(|(name, cards)| cards.iter().map(move |(card, kernel)| (name, card, kernel)))
        .filter(|(.., kernel)| {
            kernel
                .as_ref()
                .is_ok_and(|kernel| kernel.matrix_products == 0)
        })
        .map(|(name, card, _)| format!("{name} for {card}"))
        .collect();
    match on_units.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "no product on matrix units: {}",
            on_units.join(", ")
        )),
    }
}

/// Returns the folder of LLVM's `llvm-readelf` and `llvm-objdump`. The candidates are the folder `bin` in `LLVM_PATH`, Debian's
/// folder, and the PATH. The returned path is empty if only the PATH has the tools.
fn tools() -> Result<PathBuf> {
    let own = env::var_os("LLVM_PATH").map(|path| Path::new(&path).join("bin"));
    let debian = PathBuf::from("/usr/lib/llvm-22/bin");
    own.into_iter()
        .chain([debian, PathBuf::new()])
        .find(|folder| {
            process::output(Command::new(folder.join("llvm-readelf")).arg("--version")).is_some()
        })
        .ok_or_else(|| "no llvm-readelf found: set LLVM_PATH to an LLVM with tools".into())
}

fn text_of(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// Reads the results of a kernel from `line`. The line holds the kernel's name, the number of units of a cube, and an
/// outcome. The outcome is the number of bytes of shared memory, or the reason why the kernel was not compiled.
fn read(
    tools: &Path,
    folder: &Path,
    line: &str,
) -> Result<(String, std::result::Result<Compiled, String>)> {
    let mut words = line.splitn(3, ' ');
    let mut word = || words.next().ok_or_else(|| format!("short line: {line}"));
    let (name, units, outcome) = (word()?.to_string(), word()?, word()?);
    let Ok(shared_memory) = outcome.parse() else {
        return Ok((name, Err(outcome.to_string())));
    };
    let code = folder.join(format!("{name}.hsaco"));
    let tool = |tool: &str, option: &str| {
        process::output(Command::new(tools.join(tool)).arg(option).arg(&code))
            .ok_or_else(|| format!("{tool} fails on {}", code.display()))
    };
    let notes = tool("llvm-readelf", "--notes")?;
    let assembly = tool("llvm-objdump", "--disassemble")?;
    let number = |key: &str| {
        number_between(&notes, key, "\n").ok_or_else(|| format!("{name}: the code has no {key}"))
    };
    let compiled = Compiled {
        units: units.parse().map_err(|_| format!("short line: {line}"))?,
        shared_memory,
        registers: number(".vgpr_count:")?,
        scratch: number(".private_segment_fixed_size:")?,
        hot_spills: hot_spills_of(&assembly),
        matrix_products: assembly.matches("v_wmma_").count(),
    };
    Ok((name, Ok(compiled)))
}

/// Counts the instructions that access spilled registers in loops with WMMA or FMA instructions.
fn hot_spills_of(assembly: &str) -> usize {
    let start = assembly.lines().find_map(start).unwrap_or_default();
    let instructions: Vec<_> = assembly.lines().filter_map(instruction).collect();
    hot_spills(
        &instructions,
        |text| Some(start + branch_target(text)?),
        |text| text.contains("v_wmma") || text.contains("_fma"),
        |text| {
            // Buffer instructions are counted as accesses to scratch memory, too. GPUs before gfx942 access scratch memory with
            // buffer instructions, and the kernels use buffer instructions for nothing else.
            ["scratch_", "buffer_load", "buffer_store", "v_accvgpr"]
                .iter()
                .any(|spill| text.starts_with(spill))
        },
    )
}

/// Returns the address at which a kernel begins, from a line such as `0000000000001900 <kernel>:`.
fn start(line: &str) -> Option<usize> {
    let (at, _) = line.split_once(" <")?;
    line.ends_with(">:")
        .then(|| usize::from_str_radix(at, 16).ok())?
}

/// Returns the address and the text of an instruction, from a line such as `v_mul_lo_u32 v1, v1, 3 // 000000001940: D2850001
/// 00010701`.
fn instruction(line: &str) -> Option<(usize, &str)> {
    let (_, place) = line.split_once("// ")?;
    let (at, _) = place.split_once(':')?;
    Some((usize::from_str_radix(at, 16).ok()?, line.trim_start()))
}

/// Returns the target of a branch as an offset from the kernel's beginning, from a text such as `s_cbranch_scc1 65521 //
/// 000000001950: BF85FFF1 <kernel+0x18>`.
fn branch_target(text: &str) -> Option<usize> {
    let is_branch = text.starts_with("s_cbranch") || text.starts_with("s_branch");
    let (_, target) = text.rsplit_once('<')?;
    let target = target.strip_suffix('>')?;
    let offset = target.split_once("+0x").map_or("0", |(_, offset)| offset);
    is_branch.then(|| usize::from_str_radix(offset, 16).ok())?
}

fn table(kernels: &Kernels) -> String {
    let mut text = String::from(
        "# The cmma and the unit engine's kernels, compiled for AMD\n\n\
         `cargo xtask kernels --cards amd` wrote this page, by CubeCL's own compiler through LLVM: the code objects that Burn's `rocm` loads.\n\
         None of them has run. A cell has VGPRs of a unit (with AGPRs on gfx90a and gfx942), bytes of it in scratch memory, *hot* instructions on\n\
         these, or on AGPRs that hold what VGPRs could not, in loops that multiply, and the waves that registers and shared memory leave room\n\
         for: of 32 in a compute unit of gfx90a or gfx942, of 64 in a workgroup processor of gfx1100 or gfx1201. *All* is a softcap, a bias, a\n\
         mask, lengths and segments.\n",
    );
    let mut failures = String::new();
    for engine in ["cmma", "unit"] {
        let of_engine = || {
            kernels.iter().filter_map(move |(name, cards)| {
                Some((name.strip_prefix(engine)?.strip_prefix('-')?, cards))
            })
        };
        let cards: Vec<&Card> = CARDS
            .iter()
            .filter(|card| of_engine().any(|(_, cards)| cards.contains_key(card.architecture)))
            .collect();
        let heads = cards.iter().map(|card| format!(" {} |", card.architecture));
        text += &format!(
            "\n## {engine}\n\n| kernel | units | shared memory |{}\n|---|---|---|{}\n",
            heads.collect::<String>(),
            "---|".repeat(cards.len())
        );
        for (name, kernels) in of_engine() {
            let short = match name.contains(OPTIONS[1]) {
                true => name.replace(OPTIONS[1], "") + ", all",
                false => name.to_string(),
            };
            let any = kernels.values().find_map(|kernel| kernel.as_ref().ok());
            let [units, shared_memory] = any.map_or(["".into(), "".into()], |kernel| {
                [kernel.units.to_string(), kernel.shared_memory.to_string()]
            });
            text += &format!("| {short} | {units} | {shared_memory} |");
            for card in &cards {
                let cell = match kernels.get(card.architecture) {
                    Some(Ok(kernel)) => cell(card, kernel),
                    Some(Err(reason)) => {
                        failures +=
                            &format!("- {engine}-{short} for {}: {reason}\n", card.architecture);
                        "fails".into()
                    }
                    None => String::new(),
                };
                text += &format!(" {cell} |");
            }
            text += "\n";
        }
    }
    if !failures.is_empty() {
        text += &format!("\n## What fails\n\n{failures}");
    }
    text
}

fn cell(card: &Card, kernel: &Compiled) -> String {
    let hot = match kernel.hot_spills {
        0 => String::new(),
        hot => format!(" ({hot} hot)"),
    };
    let Compiled {
        registers, scratch, ..
    } = kernel;
    format!("{registers}, {scratch}{hot}, {}", card.waves(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASSEMBLY: &str = "
0000000000001900 <forward>:
	scratch_load_b32 v1, off, off offset:4                     // 000000001900: EE050006 00000001
	v_wmma_f32_16x16x16_f16 v[0:7], v[8:15], v[16:23], v[0:7]  // 000000001908: CC404000 1C020508
	scratch_store_b32 off, v1, off                             // 000000001910: EE068006 00800000
	s_cbranch_scc1 65519                                       // 000000001918: BFA2FFEF <forward+0x8>
	scratch_store_b32 off, v1, off                             // 00000000191C: EE068006 00800000
	s_endpgm                                                   // 000000001924: BFB00000
";

    #[test]
    fn hot_spills_of_loop_counts_only_if_it_multiplies() {
        assert_eq!(hot_spills_of(ASSEMBLY), 1);
        assert_eq!(hot_spills_of(&ASSEMBLY.replace("v_wmma", "v_add")), 0);
    }

    #[test]
    fn waves_are_bounded_by_registers_and_shared_memory() {
        let kernel = |registers, shared_memory| Compiled {
            units: 256,
            shared_memory,
            registers,
            scratch: 0,
            hot_spills: 0,
            matrix_products: 0,
        };
        let [cdna, rdna] = [Card::cdna("gfx90a"), Card::rdna("gfx1100")];
        assert_eq!(cdna.waves(&kernel(64, 1 << 10)), 32);
        assert_eq!(cdna.waves(&kernel(129, 1 << 10)), 12);
        assert_eq!(cdna.waves(&kernel(64, 40 << 10)), 4);
        assert_eq!(rdna.waves(&kernel(96, 1 << 10)), 64);
        assert_eq!(rdna.waves(&kernel(250, 1 << 10)), 16);
        assert_eq!(rdna.waves(&kernel(96, 64 << 10)), 16);
    }
}
