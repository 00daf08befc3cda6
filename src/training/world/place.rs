//! Which of several processes this is, as the program that started them says.

use crate::Error;
use std::env;

/// A process among those of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its number, from 0.
    pub rank: usize,
    /// Of how many.
    pub size: usize,
    /// Its number among those of its machine.
    pub local_rank: usize,
}

/// What a program that starts processes tells them in the environment.
struct Launcher {
    name: &'static str,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    kind: Kind,
}

/// How the processes of a launcher find one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// By MPI.
    Mpi,
    Torchrun,
    Slurm,
}

/// The first one that says how many processes there are is believed.
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
    // SLURM_NTASKS is there for a batch script, too, which is one process.
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        size: SLURM_SIZE,
        local_rank: "SLURM_LOCALID",
        kind: Kind::Slurm,
    },
];

/// How many processes srun has started.
const SLURM_SIZE: &str = "SLURM_STEP_NUM_TASKS";
/// The run and the attempt, as torchrun names them.
const TORCHRUN: [&str; 2] = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"];
/// The run and the attempt, as Slurm names them.
const SLURM: [&str; 3] = ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"];
/// Characters of a run's id that are told.
const LONGEST_ID: usize = 300;

/// One that is alone.
pub const ALONE: Place = Place {
    rank: 0,
    size: 1,
    local_rank: 0,
};

/// The launcher that has started this process, if one has. Slurm's plugin for PMI2 sets MPICH's rank and size as well, but no
/// local rank.
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

/// The id of this process's run and attempt. It tells the run from others that may use the same port.
pub fn run_id() -> String {
    run_id_of(variable)
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok()
}

fn run_id_of(variable: impl Fn(&str) -> Option<String>) -> String {
    let names = match launcher(&variable).map(|launcher| launcher.kind) {
        // Agents of several machines count restarts each by itself.
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

impl Place {
    /// This process's.
    ///
    /// # Errors
    /// Where what the launcher says is incomplete or no place.
    pub fn of_process() -> Result<Self, Error> {
        Self::of(variable)
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let Some(launcher) = launcher(&variable) else {
            return Ok(ALONE);
        };
        let number = |name: &str| -> Result<usize, Error> {
            let value = variable(name)
                .ok_or_else(|| format!("{name} is not set, as {} does", launcher.name))?;
            value
                .trim()
                .parse()
                .map_err(|_| format!("{name} is {value:?}, and no whole number").into())
        };
        let place = Self {
            size: number(launcher.size)?,
            rank: number(launcher.rank)?,
            local_rank: number(launcher.local_rank)?,
        };
        match place.rank < place.size {
            true => Ok(place),
            false => Err(format!(
                "{} is {}, of {} processes",
                launcher.rank, place.rank, place.size
            )
            .into()),
        }
    }

    /// Whether it writes and validates.
    pub fn is_first(self) -> bool {
        self.rank == 0
    }

    /// Which device of its kind it takes, where it sees so many.
    ///
    /// # Errors
    /// Where there are fewer devices than processes.
    pub fn device(self, visible: usize) -> Result<usize, Error> {
        match (self.local_rank, visible) {
            // Each process sees its own.
            (_, 1) => Ok(0),
            (rank, visible) if rank < visible => Ok(rank),
            (rank, visible) => Err(format!(
                "this is process {rank} of its machine, which has {visible} devices: start one process for each device"
            )
            .into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place, String> {
        let find = |name: &str| {
            let mut found = variables.iter().filter(|(known, _)| *known == name);
            found.next().map(|(_, value)| (*value).to_owned())
        };
        Place::of(find).map_err(|error| error.to_string())
    }

    #[test]
    fn every_launcher_is_understood() {
        let expected = Place {
            rank: 3,
            size: 4,
            local_rank: 1,
        };
        for Launcher {
            rank,
            size,
            local_rank,
            ..
        } in LAUNCHERS
        {
            let found = place(&[(rank, "3"), (size, "4"), (local_rank, "1")]);
            assert_eq!(found, Ok(expected));
        }
        assert_eq!(place(&[]), Ok(ALONE));
        // A batch script of Slurm.
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
        assert_eq!(place(&script), Ok(ALONE));
    }

    fn environment(variables: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        move |name| {
            let mut found = variables.iter().filter(|(known, _)| *known == name);
            found.next().map(|(_, value)| (*value).to_owned())
        }
    }

    #[test]
    fn srun_with_pmi2_is_slurm() {
        let slurm = &[
            ("PMI_RANK", "3"),
            ("PMI_SIZE", "4"),
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "1"),
        ];
        let found = launcher(&environment(slurm)).expect("a launcher");
        assert_eq!(found.kind, Kind::Slurm);
        let place = place(slurm).expect("a place");
        assert_eq!((place.rank, place.local_rank), (3, 1));
        // MPICH's mpiexec starts its own processes by srun.
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
    fn places_that_are_none() {
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
            let error = place(variables).expect_err("no place");
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn devices_of_processes() {
        let place = |local_rank| Place {
            rank: 5,
            size: 8,
            local_rank,
        };
        assert_eq!(place(1).device(2).ok(), Some(1));
        assert_eq!(place(3).device(1).ok(), Some(0));
        assert!(place(2).device(2).is_err());
    }
}
