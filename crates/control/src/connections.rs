//! The API's connections: how many there are at a time, and how long one may be silent.
//!
//! Invariant: clients that say nothing, or half of something, or do not listen, neither use up the
//! daemon's descriptors nor keep others waiting for longer than `SILENCE_MAX`.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_io_timeout::TimeoutStream;

use crate::refusal::Refusal;

/// Others wait to be accepted.
const CONNECTIONS_MAX: u32 = 128;
/// How long a client may take to send a request, and to take any part of its answer.
const SILENCE_MAX: Duration = Duration::from_secs(10);
const BODY_BYTES_MAX: usize = 1 << 20;
/// Wait after a connection could not be accepted, as there are no descriptors left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves until the sender of `stop` is gone; what was asked by then is answered.
pub async fn serve(listener: UnixListener, router: Router, mut stop: watch::Receiver<()>) {
    let router = router.layer(from_fn(take_in));
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX as usize));
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            _ = stop.changed() => break,
        };
        match accepted {
            Ok((stream, place)) => {
                tokio::spawn(converse(stream, router.clone(), stop.clone(), place));
            }
            Err(error) => {
                tracing::warn!("a client cannot be accepted: {error}");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
    drop(listener);
    // All places are free once the last connection has ended.
    let _ = places.acquire_many(CONNECTIONS_MAX).await;
}

async fn accept(
    listener: &UnixListener,
    places: &Arc<Semaphore>,
) -> io::Result<(UnixStream, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, place))
}

/// One connection, to its end.
async fn converse(
    stream: UnixStream,
    router: Router,
    mut stop: watch::Receiver<()>,
    _place: OwnedSemaphorePermit,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(SILENCE_MAX);
    let service = TowerToHyperService::new(router);
    let mut stream = Box::pin(TimeoutStream::new(stream));
    stream.as_mut().set_write_timeout_pinned(Some(SILENCE_MAX));
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    // Its errors are the client's: it has gone, or says nothing that makes sense.
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = stop.changed() => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

/// Waits for the whole of a request before anything is done about it.
async fn take_in(request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let body = match tokio::time::timeout(SILENCE_MAX, to_bytes(body, BODY_BYTES_MAX)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) => {
            return Refusal::invalid(format!("the request cannot be read: {error}"))
                .into_response();
        }
        Err(_) => {
            return Refusal::invalid(format!("the request took longer than {SILENCE_MAX:?}"))
                .into_response();
        }
    };
    next.run(Request::from_parts(head, Body::from(body))).await
}
