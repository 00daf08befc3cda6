//! Conversations as prompts, by the checkpoint's chat template.

mod guard;
mod json;
mod limits;
mod python;
mod source;
mod syntax;

use crate::{Cancellation, Gemma4Error};
use limits::{WATCH, Watch};
use minijinja::machinery::{Vm, get_compiled_template, make_string_output};
use minijinja::{Environment, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};
use source::SpecialTokens;
pub(crate) use source::{SPECIAL_TOKENS, of_folder_itself as source_of_folder};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// Who says a [`Message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions that hold for the whole conversation; the first message or none.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// One message of a conversation. Serialized, it is what other programs send to chat models:
/// `{"role": "user", "content": "…"}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// Instructions that hold for the whole conversation.
    pub fn system(content: impl Into<String>) -> Self {
        Self {
            role: Role::System,
            content: content.into(),
        }
    }

    /// What the person says.
    pub fn user(content: impl Into<String>) -> Self {
        Self {
            role: Role::User,
            content: content.into(),
        }
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self {
            role: Role::Assistant,
            content: content.into(),
        }
    }
}

/// How a conversation becomes a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// Whether the prompt ends with the beginning of the model's turn, so that the model answers. Default:
    /// true.
    pub add_generation_prompt: bool,
    /// Whether the model may think before it answers. Default: false.
    pub enable_thinking: bool,
    /// Whether special tokens in messages, such as `<turn|>`, are meant, and not text like any other. Default: false, so that
    /// no message can end its turn and begin another's.
    pub special_tokens: bool,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            enable_thinking: false,
            special_tokens: false,
        }
    }
}

/// A checkpoint's chat template: a Jinja template, rendered as transformers' `apply_chat_template` does.
///
/// # Examples
/// ```
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// use burn_gemma4::{ChatOptions, ChatTemplate, Message};
///
/// let prompt = ChatTemplate::gemma4().render(&[Message::user("Hi")], ChatOptions::default())?;
/// assert_eq!(prompt, "<bos><|turn>user\nHi<turn|>\n<|turn>model\n");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

/// The template's name in errors.
const NAME: &str = "chat_template.jinja";

/// Bytes of a time's format.
const LONGEST_TIME: usize = 1000;

impl ChatTemplate {
    /// Reads a `chat_template.jinja`.
    ///
    /// # Errors
    /// [`Gemma4Error::Io`] where the file cannot be read, [`Gemma4Error::Malformed`] where it is not UTF-8
    /// or not a Jinja template.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let source = source::of_file(path)?;
        parse(source, SpecialTokens::default()).map_err(|error| malformed(path.into(), error))
    }

    /// The template of a checkpoint's folder, from where transformers' tokenizers take it: `chat_template.jinja`; without one
    /// `chat_template` in `tokenizer_config.json`, which is a template or a list of named ones, of which it is the one called
    /// `default`; [`gemma4`](Self::gemma4) where there is neither. What templates name of the tokenizer, such as `bos_token`,
    /// is as `tokenizer_config.json` has it.
    ///
    /// # Errors
    /// [`Gemma4Error::Io`] where a file cannot be read, [`Gemma4Error::Malformed`] where one is not what it should be. That
    /// none of several templates is called `default` is an error of [`render`](Self::render).
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let (path, source, tokens) = source::of_folder(folder.as_ref())?;
        parse(source, tokens).map_err(|error| malformed(path, error))
    }

    /// A template from its text, or [`gemma4`](Self::gemma4) without one, and what it names of the tokenizer.
    ///
    /// # Errors
    /// As [`from_source`](Self::from_source).
    pub(crate) fn with_tokens(
        source: Option<&str>,
        tokens: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Gemma4Error> {
        let source = source.unwrap_or(source::GEMMA4);
        parse(source.into(), SpecialTokens::with(tokens)).map_err(refused)
    }

    /// A template from its text.
    ///
    /// # Errors
    /// [`Gemma4Error::ChatTemplate`] where the text is not a Jinja template.
    pub fn from_source(source: &str) -> Result<Self, Gemma4Error> {
        parse(source.into(), SpecialTokens::default()).map_err(refused)
    }

    /// Gemma 4's own turns, for checkpoints that bring no template: system, user and model, text only.
    pub fn gemma4() -> Self {
        parse(source::GEMMA4.into(), SpecialTokens::default())
            .expect("the template of this crate parses")
    }

    /// The prompt that `messages` become, special tokens as text: to be encoded without adding any.
    ///
    /// # Errors
    /// [`Gemma4Error::ChatTemplate`] where the template refuses the conversation, for example for the order
    /// of its roles, or fails, or computes or writes without end.
    pub fn render(
        &self,
        messages: &[Message],
        options: ChatOptions,
    ) -> Result<String, Gemma4Error> {
        self.render_until(messages, options, None)
    }

    /// As [`render`](Self::render), until `cancellation` is cancelled, which is an error.
    pub(crate) fn render_until(
        &self,
        messages: &[Message],
        options: ChatOptions,
        cancellation: Option<&Cancellation>,
    ) -> Result<String, Gemma4Error> {
        let context = context! {
            messages => messages,
            tools => (),
            add_generation_prompt => options.add_generation_prompt,
            enable_thinking => options.enable_thinking,
        };
        self.render_context(context, cancellation)
    }

    /// As [`render`](Self::render), with messages as other programs write them, whatever they have beside a role and a content:
    /// calls of tools and their answers, reasoning. `variables` are what else the template may name, such as `tools`. What a
    /// template does not name is left out.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    pub fn render_json(
        &self,
        messages: &[serde_json::Value],
        variables: &serde_json::Map<String, serde_json::Value>,
        options: ChatOptions,
    ) -> Result<String, Gemma4Error> {
        let own = context! {
            messages => messages,
            add_generation_prompt => options.add_generation_prompt,
            enable_thinking => options.enable_thinking,
        };
        let none = context! { tools => () };
        let context = context! { ..own, ..Value::from_serialize(variables), ..none };
        self.render_context(context, None)
    }

    fn render_context(
        &self,
        context: Value,
        cancellation: Option<&Cancellation>,
    ) -> Result<String, Gemma4Error> {
        let watch = Value::from_object(Watch::new(cancellation));
        let watch = Value::from_iter([(WATCH, watch)]);
        let context = context! { ..context, ..watch };
        let template = self
            .environment
            .template_from_named_str(NAME, &self.source)
            .map_err(refused)?;
        let compiled = get_compiled_template(&template);
        let guarded = guard::guard(&compiled.instructions).map_err(refused)?;
        let blocks = compiled
            .blocks
            .iter()
            .map(|(name, block)| Ok((*name, guard::guard(block)?)))
            .collect::<Result<_, minijinja::Error>>()
            .map_err(refused)?;
        let mut prompt = String::new();
        Vm::new(&self.environment)
            .eval(
                &guarded,
                context,
                &blocks,
                &mut make_string_output(&mut prompt),
                compiled.initial_auto_escape,
            )
            .map_err(refused)?;
        Ok(prompt)
    }
}

fn malformed(path: PathBuf, error: minijinja::Error) -> Gemma4Error {
    Gemma4Error::Malformed {
        path,
        reason: error.to_string(),
    }
}

fn refused(error: minijinja::Error) -> Gemma4Error {
    Gemma4Error::ChatTemplate(limits::explain(&error))
}

/// The environment that transformers gives to chat templates.
fn parse(source: String, tokens: SpecialTokens) -> Result<ChatTemplate, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", json::tojson);
    for (name, token) in tokens {
        environment.add_global(name, token);
    }
    limits::set(&mut environment);
    guard::set(&mut environment);
    python::set(&mut environment);
    syntax::check(&source)?;
    let source = syntax::without_generation(&source).into_owned();
    // It is in no environment, so that it cannot include itself, unguarded.
    environment.template_from_named_str(NAME, &source)?;
    Ok(ChatTemplate {
        environment,
        source,
    })
}

fn raise_exception(message: &Value) -> Result<Value, minijinja::Error> {
    let message = python::text(message)?;
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    if format.len() > LONGEST_TIME {
        let reason = format!("strftime_now: a format has at most {LONGEST_TIME} bytes");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason));
    }
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        let reason = format!("strftime_now: {format:?} is no format of a time");
        minijinja::Error::new(ErrorKind::InvalidOperation, reason)
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str, messages: &[Message]) -> Result<String, Gemma4Error> {
        ChatTemplate::from_source(source)?.render(messages, ChatOptions::default())
    }

    fn rendered(source: &str) -> String {
        render(source, &[Message::user("Hi")]).unwrap_or_else(|error| panic!("{source}: {error}"))
    }

    fn conversation() -> Vec<Message> {
        vec![
            Message::system(" Be brief. "),
            Message::user("One\ntwo "),
            Message::assistant("<|channel>thought\nhm<channel|> Three. "),
            Message::user("And then?"),
        ]
    }

    #[test]
    fn gemma4_turns() {
        let template = ChatTemplate::gemma4();
        let turns = "<|turn>user\nOne\ntwo<turn|>\n<|turn>model\nThree.<turn|>\n<|turn>user\nAnd then?<turn|>\n";
        for (add_generation_prompt, end) in [(true, "<|turn>model\n"), (false, "")] {
            for (enable_thinking, think) in [(true, "<|think|>\n"), (false, "")] {
                let options = ChatOptions {
                    add_generation_prompt,
                    enable_thinking,
                    ..ChatOptions::default()
                };
                let text = template.render(&conversation(), options).expect("a prompt");
                let system = format!("<bos><|turn>system\n{think}Be brief.<turn|>\n");
                assert_eq!(text, system + turns + end);
            }
        }
    }

    #[test]
    fn gemma4_without_system() {
        let template = ChatTemplate::gemma4();
        let messages = [Message::user("Hi")];
        let thinking = ChatOptions {
            enable_thinking: true,
            ..ChatOptions::default()
        };
        assert_eq!(
            template.render(&messages, thinking).expect("a prompt"),
            "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
        );
    }

    #[test]
    fn no_messages_are_no_conversation() {
        let error = ChatTemplate::gemma4()
            .render(&[], ChatOptions::default())
            .expect_err("no messages");
        assert!(
            error.to_string().contains("at least one message"),
            "{error}"
        );
    }

    #[test]
    fn blocks_are_trimmed_as_in_transformers() {
        let source = "a\n  {% if true %}\n  b\n  {% endif %}\nc\n";
        assert_eq!(rendered(source), "a\n  b\nc");
    }

    #[test]
    fn python_methods_and_loop_controls() {
        let source = "{% for x in 'a,b,c,d'.split(',') %}{% if x == 'b' %}{% continue %}{% endif %}\
                      {% if x == 'd' %}{% break %}{% endif %}{{ x.upper() }}{% endfor %}\
                      {{ messages[0].get('name', 'nobody') }}";
        assert_eq!(rendered(source), "ACnobody");
    }

    #[test]
    fn variables_of_transformers() {
        let source = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}\
                      {{ enable_thinking is defined and enable_thinking }}{{ documents is defined }}";
        assert_eq!(rendered(source), "<bos><eos>TrueTrueFalseFalse");
    }

    #[test]
    fn json_is_pythons() {
        assert_eq!(
            rendered("{{ [messages[0], 1, none, 'é'] | tojson }}"),
            r#"[{"role": "user", "content": "Hi"}, 1, null, "é"]"#
        );
        assert_eq!(
            rendered("{{ {'a': [1, '<é>']} | tojson(indent=2) }}"),
            "{\n  \"a\": [\n    1,\n    \"<é>\"\n  ]\n}"
        );
        let error = render("{{ 1 | tojson(colour=2) }}", &[]).expect_err("unknown");
        assert!(error.to_string().contains("colour"), "{error}");
    }

    #[test]
    fn times() {
        let year = rendered("{{ strftime_now('%Y') }}");
        assert!(year.len() == 4 && year.parse::<u16>().is_ok(), "{year}");
        let error = render("{{ strftime_now('%!') }}", &[]).expect_err("no format");
        assert!(error.to_string().contains("%!"), "{error}");
    }

    #[test]
    fn what_a_template_raises_is_the_error() {
        let source = "{{ raise_exception('roles must alternate') }}";
        let error = render(source, &[]).expect_err("raised");
        assert!(matches!(&error, Gemma4Error::ChatTemplate(_)), "{error}");
        assert!(
            error.to_string().contains("roles must alternate"),
            "{error}"
        );
    }

    #[test]
    fn what_does_not_parse_is_refused_with_its_line() {
        let error = ChatTemplate::from_source("a\n{% if %}").expect_err("no template");
        assert!(matches!(&error, Gemma4Error::ChatTemplate(_)), "{error}");
        assert!(
            error.to_string().contains("chat_template.jinja:2"),
            "{error}"
        );
    }

    #[test]
    fn messages_are_what_others_send() {
        let json = r#"{"role":"assistant","content":"Hi"}"#;
        let message: Message = serde_json::from_str(json).expect("a message");
        assert_eq!(message, Message::assistant("Hi"));
        assert_eq!(serde_json::to_string(&message).expect("JSON"), json);
    }
}
