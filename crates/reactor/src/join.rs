//! Waiting for several futures at once.

use std::pin::Pin;
use std::task::Poll;

/// Runs all futures at the same time; their outputs in the given order. It allocates: what
/// is on the way of every request starts its operations eagerly and awaits them one by one.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    enum State<F: Future> {
        Running(Pin<Box<F>>),
        Ended(F::Output),
    }
    let mut states: Vec<State<F>> =
        futures.into_iter().map(|future| State::Running(Box::pin(future))).collect();
    std::future::poll_fn(|context| {
        let mut pending = false;
        for state in &mut states {
            if let State::Running(future) = state {
                match future.as_mut().poll(context) {
                    Poll::Ready(output) => *state = State::Ended(output),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    let ended = states.into_iter().map(|state| match state {
        State::Ended(output) => output,
        State::Running(_) => unreachable!("poll_fn ended when none was running"),
    });
    ended.collect()
}
