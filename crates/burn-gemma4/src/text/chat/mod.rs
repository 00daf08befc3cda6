//! Chat templates: the checkpoint's Jinja template renders a conversation to a prompt.

mod content;
mod json;
mod limits;
mod python;
mod sandbox;
mod source;
mod syntax;

pub use content::{Content, MessagePart};

use crate::cancellation::Cancellation;
use crate::error::Gemma4Error;
use limits::{WATCH, Watch};
use minijinja::machinery::{Vm, get_compiled_template, make_string_output};
use minijinja::{Environment, ErrorKind, Value, context};
use serde::{Deserialize, Serialize};
use source::SpecialTokens;
pub(crate) use source::{SPECIAL_TOKENS, of_folder_itself as source_of_folder};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// The author of a [`Message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The author of instructions for the whole conversation. Only the first message may be a system message.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

/// One message of a conversation, which is serialized in the usual form of chat models:
/// `{"role": "user", "content": "…"}`.
///
/// ```
/// use burn_gemma4::{Image, Message, MessagePart};
///
/// let text = Message::user("What is a lynx?");
/// let image = Image::from_rgb(1, 1, vec![200, 150, 90])?;
/// let parts = Message::user(vec![MessagePart::Image(image), "What is this?".into()]);
/// assert_eq!((text.content.images().count(), parts.content.images().count()), (0, 1));
/// # Ok::<(), burn_gemma4::Gemma4Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The author of the message.
    pub role: Role,
    /// The text of the message, or its parts.
    pub content: Content,
}

impl Message {
    /// Creates a system message, which holds instructions for the whole conversation.
    pub fn system(content: impl Into<Content>) -> Self {
        Self {
            role: Role::System,
            content: content.into(),
        }
    }

    /// Creates a message from the user.
    pub fn user(content: impl Into<Content>) -> Self {
        Self {
            role: Role::User,
            content: content.into(),
        }
    }

    /// Creates a message from the model.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self {
            role: Role::Assistant,
            content: content.into(),
        }
    }
}

/// Options of the chat template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChatOptions {
    /// True if the prompt ends with the beginning of the model's turn, so that the model writes an answer. Default:
    /// true.
    pub add_generation_prompt: bool,
    /// True if the model may write thoughts before its answer. Default: false.
    pub enable_thinking: bool,
    /// True if special tokens in the texts of messages, such as `<turn|>`, are encoded as special tokens. If false, a
    /// message cannot end its own turn and begin another one. Default: false.
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

/// A checkpoint's chat template. The Jinja template is rendered as by `apply_chat_template` of Hugging Face
/// Transformers.
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

/// The template's name in minijinja's error messages.
const NAME: &str = "chat_template.jinja";

/// The maximum length in bytes of a time format, which is the argument of `strftime_now`.
const LONGEST_TIME: usize = 1000;

impl ChatTemplate {
    /// Reads a chat template from a `chat_template.jinja` file.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if the file cannot be read. Returns [`Gemma4Error::Malformed`] if the file is not a
    /// Jinja template in UTF-8.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let source = source::of_file(path)?;
        parse(source, SpecialTokens::default()).map_err(|error| malformed(path.into(), error))
    }

    /// Reads the chat template from a checkpoint's folder. As in Hugging Face Transformers, the first of these sources
    /// that has a template is used:
    ///
    /// - `chat_template` in `processor_config.json`, then in `chat_template.json`
    /// - `chat_template.jinja`
    /// - `chat_template` in `tokenizer_config.json`
    /// - [`gemma4`](Self::gemma4), if no file has a template
    ///
    /// A `chat_template` field holds one template, or a list of named templates. In a list, the template called
    /// `default` is used. Template variables such as `bos_token` come from `tokenizer_config.json`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Io`] if a file cannot be read, and [`Gemma4Error::Malformed`] if a file is malformed. If
    /// a list has no template called `default`, this function succeeds and [`render`](Self::render) returns the error.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let (path, source, tokens) = source::of_folder(folder.as_ref())?;
        parse(source, tokens).map_err(|error| malformed(path, error))
    }

    /// Parses the template `source`, or [`gemma4`](Self::gemma4) if `source` is `None`. `tokens` maps names of template
    /// variables to special tokens.
    ///
    /// # Errors
    /// Passes on the errors of [`from_source`](Self::from_source).
    pub(crate) fn with_tokens(
        source: Option<&str>,
        tokens: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Gemma4Error> {
        let source = source.unwrap_or(source::GEMMA4);
        parse(source.into(), SpecialTokens::with(tokens)).map_err(refused)
    }

    /// Parses the source of a template.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::ChatTemplate`] if the text is not a Jinja template.
    pub fn from_source(source: &str) -> Result<Self, Gemma4Error> {
        parse(source.into(), SpecialTokens::default()).map_err(refused)
    }

    /// Returns a template with Gemma 4's turns, for checkpoints that have no template.
    pub fn gemma4() -> Self {
        parse(source::GEMMA4.into(), SpecialTokens::default())
            .expect("the built-in template is valid Jinja")
    }

    /// Renders `messages` to a prompt. The prompt contains special tokens as text, including the BOS token. The caller
    /// must encode the prompt without adding special tokens.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::ChatTemplate`] if the template rejects the conversation, fails, or exceeds a limit on
    /// time, instructions or memory.
    pub fn render(
        &self,
        messages: &[Message],
        options: ChatOptions,
    ) -> Result<String, Gemma4Error> {
        self.render_until(messages, options, None)
    }

    /// Renders messages as [`render`](Self::render) does. If `cancellation` is cancelled during the rendering, returns
    /// an error as soon as possible.
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

    /// Renders messages that are given as JSON, as [`render`](Self::render) does. A message may have further fields
    /// besides role and content, such as tool calls. `variables` holds further template variables, such as `tools`.
    ///
    /// # Errors
    /// Passes on the errors of [`render`](Self::render).
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
        let guarded = sandbox::guard(&compiled.instructions).map_err(refused)?;
        let blocks = compiled
            .blocks
            .iter()
            .map(|(name, block)| Ok((*name, sandbox::guard(block)?)))
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

/// Parses a template, and creates an environment with the same functions and settings as in Hugging Face Transformers.
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
    sandbox::set(&mut environment);
    python::set(&mut environment);
    syntax::check(&source)?;
    let source = syntax::without_generation(&source).into_owned();
    // Parse the template with `template_from_named_str`, which does not add the template to the environment. A template
    // in the environment could include itself, and the included template would run without the sandbox.
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
        let reason = format!("strftime_now: {format:?} is not a time format");
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
    fn render_gemma4_writes_turns() {
        let template = ChatTemplate::gemma4();
        let turns = "<|turn>user\nOne\ntwo<turn|>\n<|turn>model\nThree.<turn|>\n<|turn>user\nAnd then?<turn|>\n";
        for (add_generation_prompt, end) in [(true, "<|turn>model\n"), (false, "")] {
            for (enable_thinking, think) in [(true, "<|think|>\n"), (false, "")] {
                let options = ChatOptions {
                    add_generation_prompt,
                    enable_thinking,
                    ..ChatOptions::default()
                };
                let text = template
                    .render(&conversation(), options)
                    .expect("the template renders");
                let system = format!("<bos><|turn>system\n{think}Be brief.<turn|>\n");
                assert_eq!(text, system + turns + end);
            }
        }
    }

    #[test]
    fn render_gemma4_without_system_message_writes_no_system_turn() {
        let template = ChatTemplate::gemma4();
        let messages = [Message::user("Hi")];
        let thinking = ChatOptions {
            enable_thinking: true,
            ..ChatOptions::default()
        };
        assert_eq!(
            template
                .render(&messages, thinking)
                .expect("the template renders"),
            "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
        );
    }

    #[test]
    fn render_without_messages_is_an_error() {
        let error = ChatTemplate::gemma4()
            .render(&[], ChatOptions::default())
            .expect_err("the template rejects an empty conversation");
        assert!(
            error.to_string().contains("at least one message"),
            "{error}"
        );
    }

    #[test]
    fn render_trims_blocks_as_transformers() {
        let source = "a\n  {% if true %}\n  b\n  {% endif %}\nc\n";
        assert_eq!(rendered(source), "a\n  b\nc");
    }

    #[test]
    fn render_supports_python_methods_and_loop_controls() {
        let source = "{% for x in 'a,b,c,d'.split(',') %}{% if x == 'b' %}{% continue %}{% endif %}\
                      {% if x == 'd' %}{% break %}{% endif %}{{ x.upper() }}{% endfor %}\
                      {{ messages[0].get('name', 'nobody') }}";
        assert_eq!(rendered(source), "ACnobody");
    }

    #[test]
    fn render_defines_the_variables_of_transformers() {
        let source = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}\
                      {{ enable_thinking is defined and enable_thinking }}{{ documents is defined }}";
        assert_eq!(rendered(source), "<bos><eos>TrueTrueFalseFalse");
    }

    #[test]
    fn tojson_writes_python_json() {
        assert_eq!(
            rendered("{{ [messages[0], 1, none, 'é'] | tojson }}"),
            r#"[{"role": "user", "content": "Hi"}, 1, null, "é"]"#
        );
        assert_eq!(
            rendered("{{ {'a': [1, '<é>']} | tojson(indent=2) }}"),
            "{\n  \"a\": [\n    1,\n    \"<é>\"\n  ]\n}"
        );
        let error = render("{{ 1 | tojson(colour=2) }}", &[]).expect_err("the argument is unknown");
        assert!(error.to_string().contains("colour"), "{error}");
    }

    #[test]
    fn strftime_now_formats_the_time() {
        let year = rendered("{{ strftime_now('%Y') }}");
        assert!(year.len() == 4 && year.parse::<u16>().is_ok(), "{year}");
        let error = render("{{ strftime_now('%!') }}", &[]).expect_err("the format is invalid");
        assert!(error.to_string().contains("%!"), "{error}");
    }

    #[test]
    fn raise_exception_gives_its_message() {
        let source = "{{ raise_exception('roles must alternate') }}";
        let error = render(source, &[]).expect_err("the template raises an error");
        assert!(matches!(&error, Gemma4Error::ChatTemplate(_)), "{error}");
        assert!(
            error.to_string().contains("roles must alternate"),
            "{error}"
        );
    }

    #[test]
    fn from_source_with_syntax_error_names_the_line() {
        let error =
            ChatTemplate::from_source("a\n{% if %}").expect_err("the template has a syntax error");
        assert!(matches!(&error, Gemma4Error::ChatTemplate(_)), "{error}");
        assert!(
            error.to_string().contains("chat_template.jinja:2"),
            "{error}"
        );
    }

    #[test]
    fn message_serializes_as_role_and_content() {
        let json = r#"{"role":"assistant","content":"Hi"}"#;
        let message: Message = serde_json::from_str(json).expect("the JSON is a message");
        assert_eq!(message, Message::assistant("Hi"));
        assert_eq!(
            serde_json::to_string(&message).expect("a message serializes"),
            json
        );
    }
}
