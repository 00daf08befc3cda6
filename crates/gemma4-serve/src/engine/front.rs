//! The choice of an engine for each request to several engines, and the metrics of the choices.

use super::ServedAdapter;
use super::affinity::{EngineState, Prefixes, Reason, Router};
use super::handle::Engine;
use super::metrics::DEVICE;
use super::request::{Event, Request};
use super::shared::reserved;
use crate::error::RequestError;
use prometheus::{IntCounterVec, Opts, Registry, proto::MetricFamily};
use std::sync::{Mutex, PoisonError};
use tokio::sync::mpsc::UnboundedReceiver;

/// The choice of an engine for each request to several engines.
#[derive(Debug)]
pub(super) struct Front {
    router: Mutex<Router>,
    registry: Registry,
    routed: IntCounterVec,
}

impl Engine {
    /// Returns the state of the engine at the arrival of a request.
    fn state(&self, request: &Request, prefixes: &Prefixes) -> EngineState {
        let (answers, longest) = self.shared.load.answers();
        let all = answers.saturating_add(request.choices);
        let longest = longest.max(reserved(request));
        EngineState {
            answers,
            is_full: !self.shared.limits.fit(all, longest),
            has_queue_room: self.shared.has_room_in_queue(),
            matched: self.shared.recent_prefixes.matched(prefixes),
        }
    }
}

impl Front {
    pub fn new(devices: &[String]) -> prometheus::Result<Self> {
        let registry = Registry::new_custom(Some("gemma4".into()), None)?;
        let help = "Requests by engine, and by the reason why the engine was chosen";
        let options = Opts::new("routed_requests_total", help);
        let routed = IntCounterVec::new(options, &[DEVICE, "reason"])?;
        registry.register(Box::new(routed.clone()))?;
        for device in devices {
            for reason in [Reason::Prefix, Reason::Load] {
                routed.with_label_values(&[device.as_str(), reason.name()]);
            }
        }
        Ok(Self {
            router: Mutex::new(Router::new(devices.len())),
            registry,
            routed,
        })
    }

    /// Chooses an engine for a request, and submits the request. Returns the index of the engine.
    pub fn submit(
        &self,
        engines: &[Engine],
        devices: &[String],
        request: Request,
    ) -> Result<(usize, UnboundedReceiver<Event>), RequestError> {
        let adapter = request.adapter.as_ref().map(ServedAdapter::load);
        let prefixes = Prefixes::of(&request.prompt, adapter);
        // Ignore a poisoned lock: a wrong order of the engines makes no answer wrong. The lock is held during the
        // submission, so that no other request takes the chosen engine's place in the queue.
        let mut router = self.router.lock().unwrap_or_else(PoisonError::into_inner);
        let states = engines.iter().map(|one| one.state(&request, &prefixes));
        let (index, reason) = router.choose(&states.collect::<Vec<_>>());
        let receiver = engines[index].submit_with(request, Some(prefixes))?;
        router.record(index);
        drop(router);
        let labels = [devices[index].as_str(), reason.name()];
        self.routed.with_label_values(&labels).inc();
        Ok((index, receiver))
    }

    /// Returns the numbers of requests by engine and reason.
    pub fn families(&self) -> Vec<MetricFamily> {
        self.registry.gather()
    }
}
