//! Determines the rank of this process from the environment variables of its launcher.

use crate::Error;
use std::env;

/// The rank of a process in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// The number of the process in the whole run, counted from 0.
    pub global: usize,
    /// The number of the process among the processes of its machine, counted from 0.
    pub local: usize,
    /// The number of processes in the whole run.
    pub size: usize,
}

/// A launcher: its name, the environment variables that it sets for each process, and the way in which its processes connect.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    kind: Kind,
}

/// The way in which the processes of one launcher connect to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Processes that connect through MPI.
    Mpi,
    /// Processes that connect to the address in `MASTER_ADDR`, which torchrun sets.
    Torchrun,
    /// Processes of a Slurm step, which also connect to the address in `MASTER_ADDR`.
    Slurm,
}

/// The supported launchers, in the order in which they are tried. In general, the first launcher whose `size` variable
/// is set has started this process. [`launcher`] describes the exception.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        kind: Kind::Torchrun,
    },
    Launcher {
        name: "Open MPI's mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        kind: Kind::Mpi,
    },
    Launcher {
        name: "MPICH's mpiexec",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        kind: Kind::Mpi,
    },
    // The size variable of srun is `SLURM_STEP_NUM_TASKS`, which only the processes of a Slurm step have.
    // `SLURM_NTASKS` would not do, because it is also set for a batch script, which is a single process.
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        size: SLURM_SIZE,
        local_rank: "SLURM_LOCALID",
        kind: Kind::Slurm,
    },
];

/// The variable with the number of processes in an srun step.
const SLURM_SIZE: &str = "SLURM_STEP_NUM_TASKS";
/// The variables in which torchrun passes the id of the run, and the number of restarts.
const TORCHRUN: [&str; 2] = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"];
/// The variables in which Slurm passes the ids of the job and of the step, and the number of restarts.
const SLURM: [&str; 3] = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"];
/// The largest number of characters of a run's id.
const LONGEST_ID: usize = 300;

/// The rank of the only process of a run.
pub const SINGLE_PROCESS: Rank = Rank {
    global: 0,
    local: 0,
    size: 1,
};

/// Returns the launcher that started this process, or `None`. MPICH's variables for rank and size do not prove that
/// MPICH's mpiexec started the process. Under srun, Slurm's plugin for PMI2 sets these variables too, but not MPICH's
/// local rank. So if a process of a Slurm step lacks MPICH's local rank, it counts as started by srun.
fn launcher(variable: &impl Fn(&str) -> Option<String>) -> Option<&'static Launcher> {
    let is_set = |name: &str| variable(name).is_some();
    let is_of_slurm = |launcher: &Launcher| {
        launcher.kind == Kind::Mpi && !is_set(launcher.local_rank) && is_set(SLURM_SIZE)
    };
    let mut launchers = LAUNCHERS.iter();
    launchers.find(|launcher| is_set(launcher.size) && !is_of_slurm(launcher))
}

/// True if an MPI launcher has started this process.
#[cfg(feature = "mpi")]
pub fn is_of_mpi() -> bool {
    launcher(&variable).is_some_and(|launcher| launcher.kind == Kind::Mpi)
}

/// Returns the id of the run, with the number of the run's restarts. The id distinguishes the run from other runs that may
/// use the same port.
pub fn run_id() -> String {
    run_id_of(variable)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}

fn run_id_of(variable: impl Fn(&str) -> Option<String>) -> String {
    let names = match launcher(&variable).map(|launcher| launcher.kind) {
        // With several machines, leave out the restart count. torchrun's agent on each machine counts its own restarts, so
        // the counts may differ.
        Some(Kind::Torchrun) if variable("GROUP_WORLD_SIZE").is_some_and(|size| size != "1") => {
            &TORCHRUN[..1]
        }
        Some(Kind::Torchrun) => &TORCHRUN[..],
        Some(Kind::Slurm) => &SLURM[..],
        Some(Kind::Mpi) | None => &[],
    };
    let values = names
        .iter()
        .filter_map(|name| Some(format!("{name}={}", variable(name)?)));
    let id = values.collect::<Vec<_>>().join(" ");
    id.chars().take(LONGEST_ID).collect()
}

impl Rank {
    /// Reads the rank of this process from the environment. Without a launcher, the process is the only one of its run.
    ///
    /// # Errors
    /// Returns an error if the launcher's variables are incomplete or contradict each other.
    pub fn of_process() -> Result<Self, Error> {
        Self::of(variable)
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let Some(launcher) = launcher(&variable) else {
            return Ok(SINGLE_PROCESS);
        };
        let number = |name: &str| -> Result<usize, Error> {
            let value = variable(name)
                .ok_or_else(|| format!("{name} is not set; {} sets it", launcher.name))?;
            value
                .trim()
                .parse()
                .map_err(|_| format!("{name} is {value:?}; expected a whole number").into())
        };
        let rank = Self {
            size: number(launcher.size)?,
            global: number(launcher.rank)?,
            local: number(launcher.local_rank)?,
        };
        match rank.global < rank.size {
            true => Ok(rank),
            false => Err(format!(
                "{} is {}, of {} processes; expected a smaller rank",
                launcher.rank, rank.global, rank.size
            )
            .into()),
        }
    }

    /// True for the first process, which validates and writes checkpoints.
    pub fn is_first(self) -> bool {
        self.global == 0
    }

    /// Returns the index of this process's device, out of `visible` devices.
    ///
    /// # Errors
    /// Returns an error if several devices are visible, but the machine has more processes than visible devices.
    pub fn device(self, visible: usize) -> Result<usize, Error> {
        match (self.local, visible) {
            // If only one device is visible, the launcher shows each process just its own device, which has the index 0.
            (_, 1) => Ok(0),
            (rank, visible) if rank < visible => Ok(rank),
            (rank, visible) => Err(format!(
                "this is process {rank} of its machine, which has {visible} devices; start one process for each device"
            )
            .into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank_of(variables: &[(&str, &str)]) -> Result<Rank, String> {
        let find = |name: &str| {
            let mut found = variables.iter().filter(|(known, _)| *known == name);
            found.next().map(|(_, value)| (*value).to_owned())
        };
        Rank::of(find).map_err(|error| error.to_string())
    }

    #[test]
    fn rank_of_every_launcher_is_read() {
        let expected = Rank {
            global: 3,
            local: 1,
            size: 4,
        };
        for Launcher {
            rank,
            size,
            local_rank,
            ..
        } in LAUNCHERS
        {
            let found = rank_of(&[(rank, "3"), (size, "4"), (local_rank, "1")]);
            assert_eq!(found, Ok(expected));
        }
        assert_eq!(rank_of(&[]), Ok(SINGLE_PROCESS));
        // A Slurm batch script has the variables of srun's processes, but the script is a single process.
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
        assert_eq!(rank_of(&script), Ok(SINGLE_PROCESS));
    }

    fn environment(variables: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        move |name| {
            let mut found = variables.iter().filter(|(known, _)| *known == name);
            found.next().map(|(_, value)| (*value).to_owned())
        }
    }

    #[test]
    fn srun_with_pmi2_is_recognized_as_slurm() {
        let slurm = &[
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "4"),
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "1"),
        ];
        let found = launcher(&environment(slurm)).expect("a launcher");
        assert_eq!(found.kind, Kind::Slurm);
        let rank = rank_of(slurm).expect("a rank");
        assert_eq!((rank.global, rank.local), (3, 1));
        // MPICH's mpiexec starts its processes by srun, so these processes also have Slurm's variables. Such a process
        // still counts as started by MPI.
        let mpich = &[
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "4"),
            ("MPI_LOCALRANKID", "0"),
            ("SLURM_STEP_NUM_TASKS", "2"),
        ];
        let found = launcher(&environment(mpich)).expect("a launcher");
        assert_eq!(found.kind, Kind::Mpi);
    }

    #[test]
    fn run_id_differs_by_run_and_attempt() {
        let torchrun = &[
            ("WORLD_SIZE", "2"),
            ("TORCHELASTIC_RUN_ID", "a"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("GROUP_WORLD_SIZE", "1"),
        ];
        let id = run_id_of(environment(torchrun));
        assert_eq!(id, "TORCHELASTIC_RUN_ID=a TORCHELASTIC_RESTART_COUNT=1");
        let machines = &[
            ("WORLD_SIZE", "2"),
            ("TORCHELASTIC_RUN_ID", "a"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("GROUP_WORLD_SIZE", "2"),
        ];
        let id = run_id_of(environment(machines));
        assert_eq!(id, "TORCHELASTIC_RUN_ID=a");
        let slurm = &[
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_JOB_ID", "7"),
            ("SLURM_STEP_ID", "0"),
        ];
        assert_eq!(
            run_id_of(environment(slurm)),
            "SLURM_JOB_ID=7 SLURM_STEP_ID=0"
        );
        assert_eq!(run_id_of(environment(&[("WORLD_SIZE", "2")])), "");
    }

    #[test]
    fn rank_from_invalid_variables_is_refused() {
        for (variables, word) in [
            (
                &[("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")][..],
                "RANK is not set",
            ),
            (
                &[("WORLD_SIZE", "two"), ("RANK", "0"), ("LOCAL_RANK", "0")],
                "\"two\"",
            ),
            (
                &[("WORLD_SIZE", "2"), ("RANK", "2"), ("LOCAL_RANK", "0")],
                "RANK is 2, of 2",
            ),
            (
                &[("WORLD_SIZE", "0"), ("RANK", "0"), ("LOCAL_RANK", "0")],
                "of 0",
            ),
        ] {
            let error = rank_of(variables).expect_err("no rank");
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn device_index_follows_the_local_rank() {
        let rank = |local| Rank {
            global: 5,
            local,
            size: 8,
        };
        assert_eq!(rank(1).device(2).ok(), Some(1));
        assert_eq!(rank(3).device(1).ok(), Some(0));
        assert!(rank(2).device(2).is_err());
    }
}
