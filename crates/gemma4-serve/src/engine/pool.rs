//! A pool of engines with the same model, one for each device.

use super::front::Front;
use super::handle::{Engine, EngineOptions};
use super::metrics::{Metrics, text_of};
use super::request::{Event, Request};
use super::{ServedAdapter, adapters};
use crate::error::RequestError;
use burn_gemma4::{AdapterWeights, Gemma4, Gemma4Error};
use futures_util::future::{Fuse, FutureExt, pending, select_all};
use futures_util::stream::{FuturesUnordered, TryStreamExt};
use prometheus::proto::MetricFamily;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;

/// A pool of engines with the same model, one for each device. Clones share the engines.
///
/// A request goes to the engine on which it waits least. An estimate compares the load of each engine with the time
/// that a prefix of the prompt in the engine's prefix cache saves. The limits of [`EngineOptions`] hold for each
/// engine. A pool of one engine behaves like the engine alone.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::Device;
/// use burn_gemma4::{Gemma4, LoadOptions};
/// use gemma4_serve::engine::{EngineOptions, EnginePool};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let load = || Gemma4::embedded(&Device::flex(), LoadOptions::new());
/// let models = vec![("flex:0".to_owned(), load()?), ("flex:1".to_owned(), load()?)];
/// let (pool, end) = EnginePool::start(models, &EngineOptions::default())?;
/// assert_eq!(pool.devices(), ["flex:0", "flex:1"]);
/// pool.drain();
/// let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
/// assert_eq!(runtime.block_on(end), Ok(()));
/// # Ok(())
/// # }
/// # main().unwrap();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct EnginePool(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    engines: Vec<Engine>,
    /// The names of the engines' devices.
    devices: Vec<String>,
    /// `None` for a single engine.
    front: Option<Front>,
}

/// Receives the reason of a failure of an engine, or `Ok` after a drain.
type Outcome = oneshot::Receiver<Result<(), String>>;

/// Completes with the reason as soon as one engine of a pool fails, or with `Ok` when all engines have ended after a
/// drain.
pub struct PoolEnd(Pin<Box<dyn Future<Output = Result<(), String>> + Send + Sync>>);

impl Future for PoolEnd {
    type Output = Result<(), String>;

    fn poll(
        mut self: Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

impl fmt::Debug for PoolEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolEnd").finish_non_exhaustive()
    }
}

impl EnginePool {
    /// Starts an engine for each model. All models have been loaded from the same checkpoint, each by a thread of its
    /// own. `models` holds a distinct name for each model's device, by which metrics and errors name the device. If a
    /// model is loaded while engines run, the load needs a [`DeviceUse`](burn_gemma4::DeviceUse).
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if there is no model, or if two devices have the same name. Returns this error
    /// also if the configurations or dtypes of the models differ. Weights are not compared. Also returns the errors of
    /// [`Engine::start`].
    pub fn start(
        models: Vec<(String, Gemma4)>,
        options: &EngineOptions,
    ) -> Result<(Self, PoolEnd), Gemma4Error> {
        check(&models)?;
        let started = models.into_iter().map(|(device, gemma)| {
            let (engine, outcome) = Engine::start(gemma, options.clone())?;
            Ok((device, engine, outcome))
        });
        Self::of(started.collect::<Result<_, Gemma4Error>>()?)
    }

    /// Creates a pool of engines that have started. Each engine comes with the name of its device and its outcome.
    pub(crate) fn of(
        started: Vec<(String, Engine, Outcome)>,
    ) -> Result<(Self, PoolEnd), Gemma4Error> {
        let is_single = started.len() == 1;
        let adapters = started
            .first()
            .map(|(_, engine, _)| engine.adapters.clone());
        let (mut engines, mut devices, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for (device, mut engine, outcome) in started {
            if let (false, Some(adapters)) = (is_single, &adapters) {
                engine.device = Some(device.as_str().into());
                engine.adapters = adapters.clone();
            }
            let name = engine.device.clone();
            ends.push(async move {
                let outcome = outcome.await.unwrap_or_else(|_| Err("it has ended".into()));
                outcome.map_err(|reason| match name {
                    Some(name) => format!("{name}: {reason}"),
                    None => reason,
                })
            });
            engines.push(engine);
            devices.push(device);
        }
        let front = match is_single {
            true => None,
            false => Some(Front::new(&devices).map_err(|error| {
                Gemma4Error::Device(format!("the metrics cannot be created: {error}"))
            })?),
        };
        // The first failure ends the collection, whichever engine fails.
        let end = FuturesUnordered::from_iter(ends).try_collect::<()>();
        let pool = Pool {
            engines,
            devices,
            front,
        };
        Ok((Self(Arc::new(pool)), PoolEnd(Box::pin(end))))
    }

    /// Submits a request to one of the engines. Dropping the returned events cancels the request.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::submit`]. Returns [`ErrorKind::Internal`](crate::ErrorKind::Internal) if any
    /// engine has failed, and [`ErrorKind::Busy`](crate::ErrorKind::Busy) only if the queues of all engines are full.
    pub fn submit(&self, request: Request) -> Result<AnswerEvents, RequestError> {
        if let Some(error) = self.failure() {
            return Err(error);
        }
        let open = request.choices;
        let (index, receiver) = match &self.0.front {
            None => (0, self.0.engines[0].submit(request)?),
            Some(front) => front.submit(&self.0.engines, &self.0.devices, request)?,
        };
        Ok(AnswerEvents {
            receiver,
            open,
            engine: self.0.engines[index].clone(),
            other_failure: self.failure_of_others(index).fuse(),
        })
    }

    /// Checks that a request can be submitted at this moment, before the request is prepared. [`submit`](Self::submit)
    /// checks the same again.
    ///
    /// # Errors
    /// Returns [`ErrorKind::Internal`](crate::ErrorKind::Internal) if any engine has failed,
    /// [`ErrorKind::Draining`](crate::ErrorKind::Draining) after [`drain`](Self::drain), and
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) if the queues of all engines are full.
    pub fn check_open(&self) -> Result<(), RequestError> {
        let engines = &self.0.engines;
        engines.iter().try_for_each(Engine::check_running)?;
        match engines.iter().any(|one| one.shared.has_room_in_queue()) {
            true => Ok(()),
            false => Err(engines[0].refuse_full()),
        }
    }

    /// Checks the sizes of a request against the limits of the engines, before the request is prepared: the numbers of
    /// prompt tokens, of answers, and of tokens of an answer. [`submit`](Self::submit) checks the same again.
    ///
    /// # Errors
    /// Returns an error if a number exceeds a limit, or if there would be no answer.
    pub fn check_size(
        &self,
        prompt: usize,
        choices: usize,
        max_tokens: usize,
    ) -> Result<(), RequestError> {
        self.0.engines[0].check_size(prompt, choices, max_tokens)
    }

    /// Completes when an engine other than the one with this index fails.
    fn failure_of_others(&self, index: usize) -> FailureOfOthers {
        let engines = self.0.engines.iter().enumerate();
        let others = engines.filter(|(other, _)| *other != index);
        let failures: Vec<FailureOfOthers> = others
            .map(|(_, engine)| {
                let engine = engine.clone();
                let failed = async move {
                    engine.shared.failed().await;
                    engine.stopped().await
                };
                failed.boxed()
            })
            .collect();
        match failures.is_empty() {
            true => pending().boxed(),
            false => select_all(failures).map(|(error, ..)| error).boxed(),
        }
    }

    /// Lets all engines finish the submitted requests, and refuse all further requests. The engines then end.
    pub fn drain(&self) {
        self.0.engines.iter().for_each(Engine::drain);
    }

    /// True if [`drain`](Self::drain) has been called.
    pub fn is_draining(&self) -> bool {
        self.0.engines.iter().any(Engine::is_draining)
    }

    /// Returns the reason why an engine has failed, or `None` if no engine has failed.
    pub fn failure(&self) -> Option<RequestError> {
        self.0.engines.iter().find_map(Engine::failure)
    }

    /// The names of the engines' devices.
    pub fn devices(&self) -> &[String] {
        &self.0.devices
    }

    /// The metrics of each engine, in the order of [`devices`](Self::devices).
    pub fn metrics(&self) -> impl ExactSizeIterator<Item = &Metrics> {
        self.0.engines.iter().map(Engine::metrics)
    }

    /// Returns the metrics of all engines in Prometheus's text format. If the pool has several engines, each metric has
    /// the label `device`.
    pub fn metrics_text(&self) -> String {
        let Pool {
            engines,
            devices,
            front,
        } = &*self.0;
        let Some(front) = front else {
            return engines[0].metrics().text();
        };
        let mut merged = BTreeMap::new();
        let of_engines = engines.iter().zip(devices);
        let of_engines =
            of_engines.flat_map(|(engine, device)| engine.metrics().families_of(device));
        for mut family in of_engines.chain(front.families()) {
            match merged.get_mut(family.name()) {
                None => drop(merged.insert(family.name().to_owned(), family)),
                Some(all) => MetricFamily::mut_metric(all).append(&mut family.take_metric()),
            }
        }
        text_of(&merged.into_values().collect::<Vec<_>>())
    }

    /// The largest total number of tokens of a prompt and its answer.
    pub fn context(&self) -> usize {
        self.0.engines[0].context()
    }

    /// The largest number of answers to one prompt, which is the largest number of answers that an engine decodes
    /// together.
    pub fn max_choices(&self) -> usize {
        self.0.engines[0].max_choices()
    }

    /// Loads an adapter on all engines. Requests can select the adapter after all engines have it. If one engine cannot
    /// load the adapter, the other engines free it. `weights` returns the weights for the model of the engine with the
    /// given index. The call blocks, so it must not run in an asynchronous task.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::load_adapter`] and of `weights`.
    pub fn load_adapter(
        &self,
        name: &str,
        weights: impl FnMut(usize) -> Result<AdapterWeights, RequestError>,
    ) -> Result<(), RequestError> {
        adapters::load(&self.0.engines, name, weights)
    }

    /// Unloads an adapter from all engines. Requests that have selected the adapter finish with it. New requests cannot
    /// select it.
    ///
    /// # Errors
    /// Returns the errors of [`Engine::unload_adapter`].
    pub fn unload_adapter(&self, name: &str) -> Result<(), RequestError> {
        self.0.engines[0].unload_adapter(name)
    }

    /// Returns the loaded adapter with this name, or `None` if no such adapter is loaded.
    pub fn adapter(&self, name: &str) -> Option<ServedAdapter> {
        self.0.engines[0].adapter(name)
    }

    /// The names of the loaded adapters in alphabetical order.
    pub fn adapter_names(&self) -> Vec<String> {
        self.0.engines[0].adapter_names()
    }
}

/// Checks the models of a pool.
fn check(models: &[(String, Gemma4)]) -> Result<(), Gemma4Error> {
    let refuse = |reason: String| {
        Err(Gemma4Error::Argument {
            argument: "models",
            reason,
        })
    };
    let Some((_, first)) = models.first() else {
        return refuse("is empty; expected at least one model".into());
    };
    for (index, (device, gemma)) in models.iter().enumerate() {
        if models[..index].iter().any(|(other, _)| other == device) {
            return refuse(format!(
                "has two models on {device:?}; expected distinct devices"
            ));
        }
        if gemma.config() != first.config() || gemma.dtype() != first.dtype() {
            return refuse(format!(
                "has another model or dtype on {device:?}; expected the same checkpoint on all devices"
            ));
        }
    }
    Ok(())
}

/// Completes with the error of the first engine that fails.
type FailureOfOthers = Pin<Box<dyn Future<Output = RequestError> + Send>>;

/// The events of a request. Dropping this value cancels the request.
pub struct AnswerEvents {
    receiver: UnboundedReceiver<Event>,
    /// The number of answers that have not ended.
    open: usize,
    engine: Engine,
    other_failure: Fuse<FailureOfOthers>,
}

impl AnswerEvents {
    /// Waits for the next event. Returns `None` after the end of the last answer, and after a failure. If an engine
    /// fails before the answers are complete, returns [`Event::Failed`] with the reason. This holds also if the failed
    /// engine does not serve this request.
    pub async fn next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return None;
        }
        let event = tokio::select! {
            biased;
            event = self.receiver.recv() => match event {
                Some(event) => event,
                None => Event::Failed(self.engine.stopped().await),
            },
            error = &mut self.other_failure => Event::Failed(error),
        };
        match event {
            Event::End { .. } => self.open -= 1,
            Event::Failed(_) => self.open = 0,
            Event::Text { .. } | Event::ToolCall { .. } => (),
        }
        Some(event)
    }
}

impl fmt::Debug for AnswerEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerEvents")
            .field("engine", &self.engine)
            .finish_non_exhaustive()
    }
}
