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
}

/// The first one that says how many processes there are is believed.
const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
    },
    Launcher {
        name: "Open MPI's mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    Launcher {
        name: "MPICH's mpiexec",
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
    },
    // SLURM_NTASKS is there for a batch script, too, which is one process.
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
    },
];

/// One that is alone.
pub const ALONE: Place = Place {
    rank: 0,
    size: 1,
    local_rank: 0,
};

impl Place {
    /// This process's.
    ///
    /// # Errors
    /// Where what the launcher says is incomplete or no place.
    pub fn of_process() -> Result<Self, Error> {
        Self::of(|name| env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Error> {
        let mut launchers = LAUNCHERS.iter();
        let Some(launcher) = launchers.find(|launcher| variable(launcher.size).is_some()) else {
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
