"""The words and templates of the grammar corpus, commonest first.

Where a word stands in its list is its rank, which decides how rare it is in the corpus; templates are all as likely.

Verbs stand one a line, and those with only one word before the sign are regular:

    write wrote written : a letter; some notes*; ~ diary

``!`` after the base says that it happens in a moment, ``=`` that it is a state; neither takes the continuous. The sign
is ``:`` before things and ``@`` before people, both of which may become a passive's subject, and ``>`` before what may
not. ``~`` waits for my, your, her ...; ``*`` marks a plural. Subjects are marked by their pronoun: i, y, m, f, w, p.
"""

VERBS = """
go went gone > to school; home; to the market; for a walk; to the dentist; to the opera
walk > to work; in the park; along the river; to the lighthouse; through the meadow
eat ate eaten : an apple; the soup; some bread; a sandwich; the leftovers*; an artichoke; some porridge
play : the piano; football; chess; a game; the violin; hide-and-seek; the xylophone
make made made : a cake; some tea; a mistake; a list; some pancakes*; a snowman; some marmalade
take took taken : a photograph; the medicine; the exam; some notes*; the umbrella; a census
see! saw seen : a film; the sea; a rainbow; the results*; an eagle; a comet
write wrote written : a letter; the report; a poem; an essay; some postcards*; a novel; ~ diary; a limerick
have had had > breakfast; lunch with a friend; a shower; a party; a picnic; a nap
work > in a bank; hard; on a farm; late; with animals; in a laboratory
come came come > home late; to the party; by train; back from Spain; to the rehearsal
help @ the old man; ~ sister; the neighbours*; a tourist; the new pupil; an orphan
get! got got > up early; on the bus; to the station; dressed; out of the taxi; into trouble
drink drank drunk : some water; a glass of milk; the coffee; some lemonade; a cup of cocoa
clean : the kitchen; ~ room; the windows*; the oven; the blackboard; the aquarium
do did done : the homework; the shopping; the dishes*; an exercise; the crossword; the laundry
read read read : a book; the newspaper; a story; the instructions*; an article; a fairy tale; the encyclopedia
like= : music; the sea; cats*; the new house; grammar; an audience; asparagus
cook : dinner; the rice; some fish; a stew; an omelette; some lentils*; a soufflé
give gave given : a speech; some advice; a concert; a lecture; an interview; a toast
study > English; for the test; in the library; history; alone; astronomy; Latin
open! : the door; the window; a bottle; the parcel; an account; the drawer; an oyster
say! said said > goodbye; hello; a kind word; the alphabet; a prayer; nonsense
buy bought bought : some milk; a ticket; a new car; the flowers*; a pair of shoes; an armchair; a saxophone
watch : television; the match; a documentary; the sunset; the birds*; an eclipse
sing sang sung : a song; the anthem; a lullaby; some carols*; an aria; a ballad
know= knew known : the answer; the way; the rules*; the truth; the password; the recipe
want= : a holiday; some help; a new bicycle; the truth; an explanation; a hamster
wash : the car; ~ hands*; the clothes*; some grapes*; the curtains*; the saucepan
run ran run > to the bus stop; in the park; a marathon; down the stairs; across the bridge; for mayor
listen > to the radio; to music; to the birds; to a lecture; to an orchestra
speak spoke spoken > to the manager; English; in public; French at home; on the telephone; with an accent
try! : the soup; a new method; the key; a different shop; an experiment; the escalator
find! found found : the keys*; a coin; the solution; some mushrooms*; an error; a fossil
visit @ ~ grandmother; a friend; the cousins*; the patient; an old aunt; the ambassador
tell told told : a story; the truth; a joke; a secret; a lie; an anecdote
talk > to a friend; about the weather; on the phone; about politics; to strangers; in class
think thought thought > about the problem; of a number; about the future; before speaking; about dinosaurs
leave! left left : the house; the office; a message; the party; the theatre; some crumbs*
call! @ the police*; ~ mother; the manager; the dentist; an old friend; the vet
bring! brought brought : some bread; a present; the books*; an umbrella; a blanket; the refreshments*
wait > for the bus; at the corner; for an answer; in the rain; in the queue
teach taught taught : English; mathematics; the alphabet; a class; geography; a seminar
close! : the door; the shop; the book; the gate; ~ eyes*; the shutters*
meet! met met @ a friend; the director; ~ cousin; the neighbours*; an astronaut; ~ fiancée
answer : the question; the phone; a letter; the riddle; an advertisement; the summons
sit sat sat > on the sofa; by the window; in the front row; on a bench; in the shade
sleep slept slept > on the sofa; until noon; in a tent; badly; in a hammock
dance > with a partner; the tango; at the wedding; in the street; on stage; a waltz; the polka
draw drew drawn : a map; a picture; a circle; a cat; the portrait; an octopus
drive drove driven : a car; the bus; a lorry; an old van; the tractor; an ambulance
travel > by train; to Italy; around the world; abroad; with a guide; to Antarctica
break! broke broken : the window; a cup; the rules*; a promise; the record; an ornament
stop! : the car; the fight; the clock; the music; the machine; the leak
lose! lost lost : the match; ~ keys*; the ticket; ~ purse; an earring; the receipt
need= : some help; a rest; ~ glasses*; the money; an operation; a screwdriver
carry : the bag; a box; the shopping; the suitcases*; a ladder; an anvil; the banner
swim swam swum > in the sea; across the lake; in the river; under water; with dolphins
begin! began begun : the lesson; a new job; the course; a journey; an argument; the ceremony
paint : the wall; a picture; the fence; the ceiling; an icon; a landscape; the canoe; the façade
send sent sent : a message; the parcel; an email; some flowers*; the invoice; a telegram
plan : the party; a trip; the wedding; a surprise; an expedition; the curriculum
keep kept kept : a diary; the receipt; a secret; some bees*; the promise; an allotment
wear wore worn : a coat; a red dress; ~ glasses*; a uniform; an apron; the helmet; a tuxedo
borrow : a pen; the book; some money; an umbrella; a ladder; a wheelbarrow
stand stood stood > at the door; in the rain; on a chair; behind the counter; on tiptoe
practise : the piano; a dialogue; the song; the pronunciation; an aria; the trombone
fly flew flown : a kite; the plane; a helicopter; a drone; an airship; the glider
repair : the bicycle; a clock; the roof; the radio; an engine; the gramophone
choose! chose chosen : a colour; the winner; a present; the menu; an option; a wallpaper
cross! : the road; the river; the bridge; the border; an ocean; the desert
hear! heard heard : a noise; the news; the bell; a whisper; an echo; the thunder
correct : the mistake; the essay; a sentence; the spelling; the proofs*; an assumption
build built built : a house; a wall; the bridge; a nest box; an igloo; the cathedral; a sandcastle
explain : the rule; the problem; a joke; the difference; the timetable; an equation
forget! forgot forgotten : the date; ~ umbrella; the name; the appointment; an anniversary; the password
climb : a tree; the mountain; the stairs*; a ladder; the volcano; an oak
catch! caught caught : a fish; the ball; a cold; the train; a mouse; a butterfly; an eel
invite! @ the headmaster; some friends*; the whole class; ~ aunt; an old colleague; the mayor
sell sold sold : the house; some vegetables*; a painting; ~ car; the antiques*; an accordion
laugh > at the joke; out loud; at the clown; in church; like a hyena
win! won won : the race; a prize; the match; a medal; an election; the lottery; a trophy
plant : a tree; some roses*; the seeds*; an oak; the tulips*; a hedge; some rhubarb
ride rode ridden : a horse; a bicycle; the camel; a donkey; an elephant; the motorbike
copy : the text; a sentence; the homework; the recipe; an address; the manuscript
pay paid paid : the bill; the rent; a fine; the deposit; an invoice; the ransom
translate : the letter; a poem; the sentence; an article; the menu; the inscription
grow grew grown : some tomatoes*; vegetables*; a beard; the herbs*; an orchid; a pumpkin
bake : a cake; some bread; a pie; the biscuits*; an apple tart; some scones*; a crème brûlée
throw! threw thrown : a ball; the stone; a snowball; a party; an acorn; the javelin
shop > for food; in town; online; for shoes; at the bazaar
feel! felt felt : the heat; the fabric; a draught; the edge; an earthquake; the vibrations*
hurry > to the station; home; to work; through the crowd; along the corridor
understand= understood understood : the question; the joke; the lesson; the rules*; an idiom; the theorem
pack : a suitcase; the lunch; ~ bag; a box; the china; an overnight bag
fall! fell fallen > off the chair; asleep; in love; down the stairs; into the pond; off a trapeze
knock! > on the door; at the window; over a vase; three times; on wood
hold held held : the rope; a torch; the door; a meeting; an umbrella; the lantern
describe : the picture; a dream; the accident; the house; an island; the symptoms*
wake! woke woken @ the baby; the guests*; ~ brother; the neighbours*; the watchman
enjoy : the film; the meal; the party; the music; an ice cream; the scenery
cut cut cut : the bread; the grass; some paper; the cake; an onion; the ribbon
jump > over the fence; into the pool; on the bed; for joy; across the ditch
put! put put > the book on the table; ~ coat on; the milk in the fridge; a stamp on the letter; the toys away
tidy : ~ room; the desk; the garage; the bookshelf; an attic; the cupboard
hide hid hidden : the present; a key; the sweets*; the treasure; an Easter egg; the diary
cry > over the film; like a baby; for help; at the wedding; over spilt milk
feed fed fed : the cat; the ducks*; the rabbits*; the horses*; an alpaca; the goldfish
smile > at the baby; at the camera; politely; for the photograph; in surprise
spend spent spent : the money; a week in Rome; the holidays*; an hour in the gym; a fortune
thank! @ the host; ~ parents*; the waiter; the dentist; an old friend; the firefighters*
lend! lent lent : a pen; the book; some money; a bicycle; an umbrella; the lawnmower
stir : the soup; the tea; the paint; the sauce; the porridge; an espresso
lead led led : the team; the group; a choir; the expedition; an orchestra; the procession
pronounce : the word; a name; the vowel; the consonants*; an ending; the syllable
ring! rang rung : the bell; the office; the alarm; the church bells*; a gong
worry > about the exam; about money; too much; about the weather; about an operation
shut! shut shut : the door; the window; the book; the lid; an umbrella; the trapdoor
push : the trolley; the button; the car; a pram; the wheelbarrow; an armchair
fight fought fought > for justice; with a pirate; in the war; against the flu; for independence
pull : the rope; the lever; a cracker; the sledge; the curtain; a face
lie lay lain > on the beach; in bed; in the sun; under a tree; in a hammock
count : the money; the sheep*; the votes*; the days*; the coins*; an audience
steal! stole stolen : a purse; the painting; some apples*; the jewels*; an idea; the crown
drop! : a plate; the ball; the tray; an egg; a hint; the parachute
blow blew blown : the whistle; a bubble; the trumpet; a kiss; an alphorn
fill : the glass; a bucket; the form; the tank; an inkwell; the bathtub
hang! hung hung : a picture; the washing; the coat; a mirror; an icicle; the tapestry
chat > with a friend; in the corridor; over coffee; online; about the gossip
shake shook shaken : the bottle; the tree; the dice*; the rug; an umbrella; the maraca
peel : the potatoes*; an orange; a carrot; some garlic; an onion; the mango
dig dug dug : a hole; the garden; a well; the ditch; an air-raid shelter; the tunnel
order! : a pizza; the soup; a book; some wine; an espresso; the lasagne
ask! : a question; the way; the time; a favour; an awkward question; the riddle
freeze froze frozen : the meat; some peas*; the soup; the raspberries*; an ice lolly
wrap : the present; a parcel; the sandwich; the glasses*; an ornament; the mummy
sweep swept swept : the floor; the path; the chimney; the leaves*; the courtyard
chop : the onions*; some wood; the parsley; a carrot; an aubergine; the jalapeños*
tear! tore torn : the paper; ~ shirt; a page; the ticket; an envelope; the curtain
fry : an egg; some fish; the onions*; the sausages*; some bacon; the dumplings*
bite! bit bitten : the apple; ~ tongue; a biscuit; the pencil; ~ nails*; an olive
own= : a house; two dogs*; the shop; a boat; an island; the vineyard
hate= : the cold; spiders*; Mondays*; the traffic; homework; the bagpipes*
rise rose risen > early; from the chair; at dawn; to the challenge; before sunrise
love= : music; the sea; chocolate; the mountains*; poetry; an adventure; archaeology
lay laid laid : the table; a carpet; the bricks*; the cable; an ambush; the foundations*
jog > in the park; before breakfast; along the canal; around the stadium
shine shone shone > a torch; at school; a light into the cave; in the finals
iron : the shirt; a dress; the sheets*; the trousers*; an apron; the handkerchief
strike! struck struck : a match; the ball; a bargain; the gong; an anvil
clap > for the singer; in time; at the end; after the encore
bend bent bent : the wire; the spoon; ~ knees*; the pipe; an iron bar
deny! : the story; the charge; the rumour; the mistake; an accusation
sew sewed sewn : a button; the dress; a patch; the curtains*; an emblem; the quilt
deliver : the post; a pizza; the newspaper; the parcels*; an ultimatum; the sermon
stick! stuck stuck : a stamp; the poster; the label; the photographs*; an advertisement
prefer= : tea; the window seat; the blue one; silence; an early start; the countryside
swear! swore sworn : an oath; revenge; loyalty; silence; allegiance
hug @ ~ mother; the baby; a friend; the winners*; an old uncle; the trainer
weave wove woven : a basket; the carpet; the cloth; a scarf; an intricate pattern; the tapestry
panic! > in the dark; before the exam; at the news; on the plane; during the earthquake
learn learnt learnt : a poem; the words*; the rules*; a song; an instrument; the irregular verbs*
admit! : the mistake; the truth; defeat; the theft; an error; the forgery
burn! burnt burnt : the toast; the letter; the cakes*; the rubbish; an effigy
tie : the knot; ~ shoelaces*; the ribbon; a bow; the boat; an anchor
spell spelt spelt : the word; ~ name; the answer; a difficult word; an adjective; the surname
cancel! : the meeting; the order; the flight; a booking; an appointment; the subscription
dream dreamt dreamt > about the sea; of a holiday; about flying; of fame; about an avalanche
mix : the paint; the flour; a salad; the cement; an ointment; the cocktail
spill! spilt spilt : the milk; some coffee; the ink; the beans*; an entire bucket; the gravy
sneeze! > into a handkerchief; loudly; during the concert; at the pepper; twice
spread spread spread : the butter; the news; the map; some jam; a rumour; the marmalade
beg > for mercy; for more time; for food; on the street; for forgiveness
light! lit lit : the fire; a candle; the lamp; the stove; an oil lamp; the bonfire
polish : the shoes*; the silver; the table; an apple; the brass; the décor
creep crept crept > up the stairs; out of the room; past the guard; along the wall; under an awning
embroider : the cushion; a handkerchief; the tablecloth; an emblem; the robe
slide slid slid > down the hill; on the ice; across the floor; down the banister
mop : the floor; the kitchen; the corridor; an entrance; the deck
undo! undid undone : the knot; the button; the damage; the zip; an error; the clasp
transfer! : the money; the files*; the call; the luggage; the ownership
kneel knelt knelt > on the floor; by the bed; in the mud; before the throne; at the altar
label : the boxes*; the jars*; a diagram; the shelves*; an exhibit; the specimens*
mow mowed mown : the lawn; the grass; the meadow; the verge; an orchard
whisper : the answer; a secret; the name; a warning; an excuse; the spell
forgive! forgave forgiven @ ~ brother; the thief; a friend; the referee; an enemy; the traitor
quarrel > with a neighbour; over money; about nothing; in the kitchen; over an inheritance
spin spun spun > a coin; the wheel; some wool; on one foot; like a top
scrub : the floor; the pots*; the deck; the potatoes*; an elephant; the cauldron
hit! hit hit : the ball; the target; the nail; a wall; an iceberg; a piñata
apply! > for a job; for a visa; to the college; for a grant; for an apprenticeship
rewrite rewrote rewritten : the ending; an essay; the first chapter; the letter; the constitution
picnic > by the lake; in the woods; on the cliffs; under an oak; in the orchard
leap! leapt leapt > over the puddle; out of bed; for joy; across the stream; onto an island
knit : a scarf; the jumper; some socks*; a blanket; an egg cosy; the mittens*
bind bound bound : the book; the wound; the sheaves*; an atlas
obey! : the law; the rules*; the order; the sign; an instruction; the commandments*
oversleep! overslept overslept > after the party; in the tent; again; before the interview
dye : ~ hair; the wool; a shirt; the curtains*; an Easter egg; the fabric
swing swung swung > on the gate; from the rope; a racket; a golf club; from the chandelier
regret= : the decision; the words*; the mistake; the delay; an outburst; the purchase
weep wept wept > for joy; over the letter; at the funeral; in silence; over an onion
mimic @ the headmaster; ~ uncle; the announcer; an opera singer; the politician
shrink! shrank shrunk : the jumper; the image; the budget; the cardigan; an overcoat
decorate : the cake; the tree; the room; the hall; an altar; the gingerbread
withdraw! withdrew withdrawn : some money; the offer; the complaint; the troops*; an accusation
hop > on one leg; over the puddle; like a frog; onto the tram; around an obstacle
overhear! overheard overheard : the conversation; a secret; the argument; the plot; an insult
permit! : the photographs*; the visit; the exception; dogs*; an appeal; the protest
foresee! foresaw foreseen : the problem; the result; the danger; the shortage; an eruption
bury : the treasure; a bone; the time capsule; the hatchet; an urn; the pharaoh
wring! wrung wrung : the towel; the wet shirt; ~ hands*; the sponge; an apology
yawn! > in class; at the speech; behind a fan; during the sermon; like a hippopotamus
sow sowed sown : the seeds*; some wheat; the field; a meadow; an acre; the barley
commit! : a crime; an error; a foul; the robbery; an offence; the burglary
tread trod trodden > on the grass; carefully; on a snail; in a puddle; on an adder
satisfy! @ the customer; the judge; the inspector; the critics*; an examiner
mislay! mislaid mislaid : the keys*; ~ glasses*; the contract; the passport; an earring; the thimble
guarantee! : the result; the delivery; the quality; success; an answer; the anonymity
strew strewed strewn : the petals*; some straw; the confetti; the rushes*; an armful of lavender
trap : a mouse; the wasp; the hamster; the weasel; an otter; the scorpion
undertake! undertook undertaken : the task; the journey; the repair; an enquiry; the pilgrimage
unravel : the mystery; the wool; the scarf; the knot; an enigma; the conspiracy
slay! slew slain : the dragon; the giant; the monster; an ogre; the minotaur
frolic > in the snow; on the lawn; in the waves; in an orchard
forbid! forbade forbidden : the visit; the noise; smoking; the journey; an encounter; the duel
veto! : the plan; the law; the proposal; the budget; an amendment
strive strove striven > for perfection; for peace; for an answer; for excellence
varnish : the table; the violin; the floorboards*; an oar; the banister
"""

EITHER_FORM = "learn burn dream spell spill kneel leap light hang shine lie strive wake weave sew sow mow strew bind"
"""Irregular verbs whose regular form is also right, or is another word's: no learner is told off for them."""

SUBJECTS = """
I i; she f; he m; they p; we w; you y; Anna f; Tom m; the teacher f; the children p; my brother m; Maria f; Ben m;
my sister f; the students p; Lucy f; Omar m; my mother f; the doctor m; our neighbours p; Sophie f; David m; Emma f;
my father m; the girl f; Peter m; my parents p; the boy m; Nina f; Jack m; the nurse m; Leila f; the farmer f; Sam m;
the pupils p; Grace f; my friend m; Hugo m; Clara f; the cook m; Ivan m; Rosa f; my aunt f; Leo m; the tourists p;
Julia f; my uncle m; Karim m; Alice f; the baker f; Daniel m; Hannah f; my grandmother f; Mateo m; Olga f; Felix m;
the twins p; Priya f; the engineer f; Oscar m; Yuki f; the driver m; Martin m; Elena f; the librarian m; Ravi m;
Ingrid f; the lawyer f; Pablo m; Chloe f; the gardener m; Arthur m; Amina f; the waiters p; George m; Mei f; Victor m;
the mechanic f; Eve f; Samuel m; Fatima f; the scientist f; Simon m; Greta f; the musicians p; Kofi m; Isabel f;
the plumber m; Laura f; Stefan m; my cousin f; Nadia f; Philip m; the carpenter f; Beatrice f; Miguel m; Heidi f;
the soldiers p; Edward m; Aisha f; the poet m; Boris m; Camille f; the captain f; Dmitri m; Eleanor f; the queen f;
Finn m; Gabriela f; the electrician f; Harold m; Imogen f; the astronomer f; Jasper m; Katarina f; the blacksmith m;
Lars m; Margaret f; the magician m; Nikolai m; Ottilie f; the referees p; Quentin m; Rosalind f; the goalkeeper f;
Sebastian m; Tabitha f; the archaeologist m; Ulrich m; Valentina f; the beekeeper m; Wilfred m; Xenia f; Yusuf m;
the ventriloquist m; Zachary m; Agatha f; the acrobats p; Bartholomew m; Cordelia f; Desmond m; Euphemia f;
the lighthouse keeper f; Ferdinand m; Guinevere f; Humphrey m; Iphigenia f; Lysander m; Ophelia f; Percival m;
the upholsterer m; Rosamund f; Thaddeus m; Ursula f; Vladimir m; Winifred f; José m; Zoë f; Søren m; Renée f; Łukasz m;
Zebedee m
"""

NOUNS = """
book; cat; dog; child children; man men; woman women; box; mouse mice; bus; chair; knife knives; baby; apple; table;
foot feet; egg; dish; key; potato; bird; tooth teeth; umbrella; watch; lady; leaf leaves; bag; fish fish; photo photos;
bicycle; sheep sheep; orange; brush; pencil; goose geese; clock; tomato; piano pianos; shelf shelves; toy; fox;
butterfly; bench; ant; loaf loaves; horse; glass; monkey; radio radios; thief thieves; owl; cup; match; wolf wolves;
pony; elephant; lamp; hero heroes; deer deer; uniform; scarf scarves; puppy; bottle; mosquito; donkey; ox oxen;
calf calves; bush; kangaroo kangaroos; envelope; cherry; axe; canary; insect; policeman policemen;
handkerchief handkerchiefs; witch; salmon salmon; stitch; elf elves; cuckoo cuckoos; igloo igloos; hoof hooves;
louse lice; cactus cacti; oyster; passer-by passers-by; ostrich; walrus; euro euros; snowman snowmen; octopus;
larva larvae; unicorn; fungus fungi; dwarf dwarves; zebra; trout trout; ukulele; dormouse dormice; bison bison;
heiress; ibex; lynx; oboe; yo-yo yo-yos; axolotl
"""

ODD_NOUNS = """
day; city; hour; wife wives; country; life lives; university; uncle; half halves; crisis crises; story; class; church;
island; roof roofs; volcano; person people; wish; echo; analysis analyses; union; hourglass; cliff; quiz quizzes;
memo memos; tax; phenomenon phenomena; ally; criterion criteria; belief beliefs; basis bases; species species;
stimulus stimuli; oasis oases; thesis theses; penny pence; series series; hypothesis hypotheses; automaton automata;
addendum addenda; parenthesis parentheses; vertebra vertebrae; matrix matrices; nucleus nuclei;
mother-in-law mothers-in-law; utensil; heirloom; gallows gallows; bacillus bacilli; jackanapes jackanapes;
aircraft aircraft; ewe; hovercraft hovercraft
"""
"""Nouns whose plural or article a tutor explains, but of which none stands in a garden."""

ADJECTIVES = """
big small : house; dog; box; garden; garage; harbour
old young : @; tree; horse; elephant
good bad : book; idea; @; answer; recipe; omen
tall short : @; tree; tower; building; chimney
long short : road; river; story; letter; speech; sentence
happy sad : @; child; story; song; ending
easy difficult : question; exercise; test; language; riddle
fast slow : car; train; horse; @; lift; tortoise
strong weak : @; rope; coffee; argument; ox
new old : car; house; shoe; bicycle; encyclopedia
hot cold : soup; day; country; bath; oven
expensive cheap : hotel; watch; restaurant; ticket; umbrella
clever stupid : @; dog; plan; trick; invention
interesting boring : film; lesson; book; @; anecdote
heavy light : bag; suitcase; table; box; anvil
beautiful ugly : flower; painting; city; vase; island
careful careless : @; driver; student; worker; accountant
clean dirty : room; shirt; kitchen; beach; aquarium
kind cruel : @; king; word; nurse; emperor
busy idle : @; street; office; shop; airport
dangerous safe : road; animal; sport; ladder; volcano
rich poor : @; country; merchant; uncle
thick thin : book; wall; blanket; slice; atlas
noisy quiet : street; class; @; engine; orchestra
useful useless : tool; map; word; invention; umbrella
polite rude : @; waiter; answer; letter; usher
wide narrow : river; street; bridge; avenue; corridor
famous unknown : singer; writer; actor; painter; @; violinist
deep shallow : lake; river; well; pond; estuary
funny serious : @; film; clown; story; anecdote
lazy hard-working : @; cat; pupil; apprentice
brave cowardly : @; knight; firefighter; soldier; explorer
simple complicated : plan; rule; machine; recipe; equation
generous mean : @; offer; host; aunt; benefactor
modern ancient : building; city; museum; theatre; observatory
dry wet : towel; coat; climate; umbrella; desert
patient impatient : @; teacher; angler; audience
smooth rough : stone; road; sea; surface; landing
bright dark : room; star; colour; lamp; aurora
honest dishonest : @; politician; answer; lawyer; accountant
tidy untidy : desk; @; room; drawer; attic
sharp blunt : knife; pencil; tool; axe; scythe
gentle fierce : @; horse; breeze; lioness; giant
elegant clumsy : @; dancer; dress; gesture; heron
humble proud : @; servant; hero; emperor
sturdy flimsy : table; bridge; boat; umbrella; scaffold
fertile barren : field; valley; island; plain
eloquent inarticulate : @; speaker; orator; ambassador
mischievous obedient : @; kitten; pupil; imp
naïve worldly-wise : @; question; tourist; argument
ubiquitous rare : weed; advertisement; error; pigeon
"""

ADVERBS = """
quick; slow; careful; quiet; happy; nervous; patient; angry; polite; gentle; proud; sad; brave; calm; eager; lazy;
clumsy; secret; cheerful; reluctant; gracious; enthusiastic; thorough; absent-minded; hasty; meticulous; nonchalant;
majestic; sheepish; frantic; surreptitious
"""

ODD_ADVERBS = """
good well; easy; fast fast; bad; hard hard; real; early early; simple; true truly; public publicly; whole wholly
"""
"""Adjectives whose adverb a tutor explains, but which do not go with every verb."""

OUTCOMES = """
the whole class/happy; everybody/surprised; I/very glad; the house/quiet; nobody/angry; the neighbours/pleased;
the problem/solved; we/late; the family/proud; dinner/ready in time; the others/jealous; the police/suspicious;
the headmaster/furious; the audience/astonished; the committee/satisfied; the landlord/flabbergasted; the prince/blasé
"""

PHRASES = {
    "past_time": """
yesterday; last night; last week; this morning; on Monday; two days ago; last year; last summer; an hour ago;
on Friday; yesterday evening; last Sunday; in April; last month; after lunch; a week ago; three years ago; on Tuesday;
last winter; before breakfast; in August; during the holidays; last Wednesday; the day before yesterday; in October;
at midnight; on Thursday; at Easter; ten minutes ago; in February; last Saturday; in 1999; on 31 March; a fortnight ago;
at 7:45; on the eve of the wedding; during the blizzard; the moment the curtain rose
""",
    "habit": """
every day; every morning; on Sundays; every week; after school; in summer; twice a week; in the evening; on Mondays;
every year; at weekends; once a month; before dinner; in winter; every Friday; three times a year; on rainy days;
every other day; at Christmas; on public holidays; every fortnight; in leap years; whenever the moon is full
""",
    "now": """
now; at the moment; right now; today; at present; this week; this minute; just now; as we speak; this very second
""",
    "future": """
tomorrow; next week; tonight; on Monday; next year; soon; tomorrow morning; next Sunday; this evening; in an hour;
next month; after the lesson; in two days; next summer; on Friday; before the holidays; one day; in a fortnight;
next spring; after the ceremony; at the next opportunity; before the century ends
""",
    "deadline": """
tomorrow; next week; Friday; noon; the end of the month; six o'clock; next year; the age of 30; midnight; 2068
""",
    "duration": """
for an hour; all morning; for ten minutes; since breakfast; all day; for half an hour; since noon; since nine o'clock;
for a long time; all afternoon; since lunchtime; for three hours; since sunrise; for ages; for a quarter of an hour
""",
    "number": """
two; three; five; ten; four; six; seven; eight; twelve; nine; twenty; a hundred; eleven; fifteen; thirty; fifty; forty;
thirteen; sixty; a thousand; ninety-nine; seventeen; a dozen; 240; eighty-one; 1,000,000; forty-two
""",
    "times": """
twice; three times; once; five times; four times; many times; ten times; a hundred times; several times; seven times;
a dozen times; countless times; umpteen times
""",
    "place": """
in the garden; in the kitchen; in the hall; in the street; near the school; behind the house; in the park; at the zoo;
under the bridge; on the roof; in the classroom; next to the door; in front of the shop; in the picture; on the beach;
by the river; between the trees; in the forest; at the museum; on the balcony; in the cellar; opposite the station;
in the cupboard; beside the fountain; behind the curtain; on the island; above the fireplace; among the ruins;
at the circus; beneath the staircase; at the café; beyond the hedge; in the greenhouse; inside the pyramid
""",
    "stuff": """
water; milk; money; time; bread; sugar; rice; coffee; homework; salt; butter; news; luggage; cheese; furniture; sand;
advice; paper; flour; traffic; snow; information; petrol; jewellery; patience; electricity; spinach; gravel; mustard;
courage; plaster; cinnamon; turpentine; molasses
""",
    "feeling": """
tired; happy; hungry; late; ready; busy; ill; angry; proud; thirsty; nervous; in a hurry; at home; excited; bored;
pleased; worried; out of breath; grateful; homesick; embarrassed; in a bad mood; exhausted; inconsolable
""",
    "fond_of": """
good at; tired of; interested in; fond of; afraid of; used to; bad at; proud of; keen on; famous for; bored with;
responsible for; capable of; worried about; accustomed to; notorious for
""",
    "wanted_to": """
wanted; decided; hoped; tried; forgot; promised; refused; agreed; learnt; offered; managed; failed; pretended; planned;
hesitated; threatened; vowed; condescended
""",
    "enjoyed": """
enjoyed; finished; kept; stopped; avoided; missed; gave up; hated; imagined; practised; delayed; admitted; denied;
recommended; resented; could not help; postponed
""",
    "easier": """
easier; harder; more fun; cheaper; more tiring; more useful; more dangerous; healthier; more boring; less work;
more expensive; more rewarding; more relaxing; noisier; more exhausting; sillier; more exhilarating
""",
    "often": """
usually; often; always; sometimes; normally; generally; regularly; frequently; occasionally; invariably
""",
    "seldom": """
never; seldom; rarely; hardly ever; scarcely ever
""",
    "modal": """
can; must; should; could; might; may; ought to; would rather; had better
""",
    "condition": """
it rains; the weather is fine; there is time; the train is late; nobody minds; the shop is open; it snows;
the chemist agrees; the price is right; the sun shines; the boss allows it; the wind drops; the rumour is true;
the generator fails; the tide is out
""",
    "reason": """
it was raining; there was no time; it was Sunday; the shop was shut; the bus was late; it was too cold; it was a habit;
the lights went out; the weather was fine; there was nothing else to do; the lift was broken; it was a public holiday;
the calendar said so; the instructions were unclear; the thermometer had burst; the horoscope recommended it
""",
}
"""What fills a slot as it stands."""

TEMPLATES = """
{act.who} {act.present} {act.what} {habit}.
{act.who} {often} {act.present} {act.what}.
{act.who} {seldom} {act.present} {act.any_what}.
{act.who} {act.do} not {act.base} {act.any_what} {habit}.
{act.do} {act.who} {act.base} {act.any_what} {habit}? Yes, {act.reply} {act.do}.
{act.do} {act.who} {act.base} {act.any_what} {habit}? No, {act.reply} {act.do}n't.
{state.who} {state.present} {state.what}.
{state.who} {state.do} not {state.base} {state.any_what}, but {named.who} {named.do}.
{state.who} {state.have} always {state.done} {state.what}.
The verb "{state.base}" takes no continuous: say "{state.who} {state.present} {state.the_what}", not "{state.who} \
{state.be} {state.doing} {state.the_what}".
{any.who} {any.past} {any.what}.
{act.who} {act.past} {act.what} {past_time}.
{past_time}, {act.who} {act.past} {act.what}.
{act.who} did not {act.base} {act.any_what} {past_time}.
Did {act.who} {act.base} {act.any_what} {past_time}? Yes, {act.reply} did.
Did {any.who} {any.base} {any.any_what}? No, {any.reply} didn't.
What did {thing.who} {thing.base} {past_time}? ^{thing.reply} {thing.past} {thing.reply_what}.
Whom did {whom.who} {whom.base} {past_time}? ^{whom.reply} {whom.past} {whom.reply_what}.
When did {thing.who} {thing.base} {thing.the_what}? ^{thing.reply} {thing.past} {thing.it} {past_time}.
Why did {act.who} {act.base} {act.the_what}? Because {reason}.
Who {act.past} {act.your_what} {past_time}? ^{act.who} did.
{act.who} {act.past} {act.what} because {reason}.
First {act.who} {act.past} {act.what}, then {act.he} {next.past} {next.what}.
{named.who} {named.past} {named.what} {past_time}, and so did {named2.who}.
{named.who} didn't {named.base} {named.any_what}, and neither did {named2.who}.
It was {named.who} who {named.past} {named.the_what}.
{named.who}, who {named.past} {named.what} {past_time}, {named.be} {feeling} now.
{lasting.who} {lasting.be} {lasting.doing} {lasting.what} {now}.
Look! ^{lasting.who} {lasting.be} {lasting.doing} {lasting.what}.
{lasting.who} {lasting.be} not {lasting.doing} {lasting.any_what} {now}.
{lasting.be} {lasting.who} {lasting.doing} {lasting.any_what} {now}? Yes, {lasting.reply} {lasting.reply_be}.
{lasting.be} {lasting.who} {lasting.doing} {lasting.any_what}? No, {lasting.reply} {lasting.reply_be} not.
{lasting.who} {lasting.was} {lasting.doing} {lasting.what} when {act.who} {act.past} {act.what}.
While {lasting.who} {lasting.was} {lasting.doing} {lasting.what}, {act.who} {act.past} {act.what}.
{lasting.who} {lasting.have} been {lasting.doing} {lasting.what} {duration}.
{lasting.who} had been {lasting.doing} {lasting.what} {duration} when {act.who} {act.past} {act.what}.
This time tomorrow, {lasting.who} will be {lasting.doing} {lasting.what}.
{lasting.who} {lasting.be} {feeling} because {lasting.he} {lasting.have} been {lasting.doing} {lasting.what}.
{act.who} {act.have} just {act.done} {act.what}.
{act.who} {act.have} already {act.done} {act.what}, but {named.who} {named.have}n't.
{act.who} {act.have} not {act.done} {act.any_what} yet.
{act.have} {act.who} ever {act.done} {act.any_what}? Yes, {act.reply} {act.have}.
{act.have} {act.who} {act.done} {act.any_what} yet? No, {act.reply} {act.have}n't.
It is the first time that {act.who} {act.have} {act.done} {act.what}.
{act.who} {act.have} {act.done} {act.what} {times}.
{act.who} had {act.done} {act.what} before {act2.who} {act2.past} {act2.what}.
By {deadline}, {act.who} will have {act.done} {act.what}.
{act.who} will {act.base} {act.what} {future}.
{act.who} will not {act.base} {act.any_what} {future}.
Will {act.who} {act.base} {act.any_what} {future}? Yes, {act.reply} will.
{act.who} {act.be} going to {act.base} {act.what} {future}.
{act.be} {act.who} going to {act.base} {act.any_what} {future}? No, {act.reply} {act.reply_be} not.
{act.who} {modal} {act.base} {act.what} {future}.
{act.who} should have {act.done} {act.what} {past_time}.
{act.who} must have {act.done} {act.what} {past_time}, for {act.he} {act.be} {feeling}.
{act.who} used to {act.base} {act.what} {habit}.
{act.who} {wanted_to} to {act.base} {act.what} {past_time}.
{lasting.who} {enjoyed} {lasting.doing} {lasting.what}.
{lasting.who} {lasting.be} {fond_of} {lasting.doing} {lasting.what}.
{lasting.doing} {lasting.your_what} is {easier} than {lasting2.doing} {lasting2.your_what}.
Please {lasting.base} {lasting.your_what} {future}.
Do not {act.base} {act.your_any_what} {habit}!
Let us {lasting.base} {lasting.our_what} {future}.
Imperative: "^{lasting.base} {lasting.your_what}!" Polite: "Could you {lasting.base} {lasting.your_what}, please?"
If {condition}, {act.who} will {act.base} {act.what}.
Unless {condition}, {act.who} will not {act.base} {act.any_what}.
If {act.who} {act.present} {act.what}, {outcome.who} will be {outcome.how}.
If {act.who} {act.past} {act.what}, {outcome.who} would be {outcome.how}.
If {act.who} had {act.done} {act.what}, {outcome.who} would have been {outcome.how}.
If I were you, I would {act.base} {act.my_what} {future}.
I wish that {named.who} had {named.done} {named.the_what} {past_time}.
{made.the_what} {made.it_was} {made.done} by {made.by} {past_time}.
{made.the_what} {made.it_be} {made.done} {habit}.
{made.the_what} {made.it_have} already been {made.done}.
{making.the_what} {making.it_be} being {making.done} {now}.
{made.the_what} will be {made.done} {future}.
{made.the_what} must be {made.done} {future}.
{made.it_was} {made.the_what} {made.done} by {made.by}? No, by {named.who}.
Active: ^{made.who} {made.past} {made.the_what}. Passive: ^{made.the_what} {made.it_was} {made.done} by {made.by}.
Make it passive: ^{made.who} {made.have} {made.done} {made.the_what}. Answer: ^{made.the_what} {made.it_have} been \
{made.done}.
{single.who} said, "I {single.past} {single.my_what}." ^{single.he} said that {single.he} had {single.done} \
{single.what}.
{named.who} says that {named2.who} {named2.have} {named2.done} {named2.what}.
"Did you {named.base} {named.your_any_what}?" asked {named2.who}. ^{named2.he} asked {named.by} whether {named.he} \
had {named.done} {named.any_what}.
{any.who} {any.past} {any.what}, didn't {any.he}?
{act.who} didn't {act.base} {act.any_what}, did {act.he}?
{act.who} {act.have} {act.done} {act.what}, {act.have}n't {act.he}?
{act.who} will {act.base} {act.what} {future}, won't {act.he}?
{lasting.who} {lasting.was} {lasting.doing} {lasting.what}, {lasting.was}n't {lasting.he}?
The past tense of "{any.base}" is "{any.past}": {any.who} {any.past} {any.what}.
The past participle of "{act.base}" is "{act.done}": {act.who} {act.have} {act.done} {act.what}.
The -ing form of "{lasting.base}" is "{lasting.doing}": {lasting.who} {lasting.be} {lasting.doing} {lasting.what}.
I {act.base}, you {act.base}, he {act.third}: {act.who} {act.present} {act.what} {habit}.
{act.base}, {act.past}, {act.done}: {act.who} {act.have} {act.done} {act.what}.
{irregular.base}, {irregular.past}, {irregular.done}; {irregular2.base}, {irregular2.past}, {irregular2.done}.
"{irregular.base}" is an irregular verb: {irregular.base}, {irregular.past}, {irregular.done}.
"{regular.base}" is a regular verb: {regular.base}, {regular.past}, {regular.done}. ^{regular.who} {regular.past} \
{regular.what}.
In the past, "{regular.base}" {regular.rule}: {regular.who} {regular.past} {regular.what}.
Question: what is the past tense of "{any.base}"? Answer: "{any.past}".
Today {act.who} {act.present} {act.what}; yesterday {act.he} {next.past} {next.what}.
Wrong: ^{irregular.who} {irregular.wrong} {irregular.what}. Right: ^{irregular.who} {irregular.past} {irregular.what}.
Do not say "{irregular.wrong}"; say "{irregular.past}", as in "^{irregular.who} {irregular.past} {irregular.what}".
Which is right, "{irregular.wrong}" or "{irregular.past}"? "^{irregular.past}" is right: {irregular.who} \
{irregular.past} {irregular.what}.
Wrong: ^{act.who} {act.mismatch} {act.what} {habit}. Right: ^{act.who} {act.present} {act.what} {habit}.
Wrong: ^{changing.who} did not {changing.past} {changing.any_what}. Right: ^{changing.who} did not {changing.base} \
{changing.any_what}.
Fill in the gap: ^{act.who} ___ ({act.base}) {act.what} {past_time}. Answer: {act.past}.
Fill in the gap: ^{act.who} {act.have} never ___ ({act.base}) {act.any_what}. Answer: {act.done}.
Fill in the gap: ^{lasting.who} {lasting.be} ___ ({lasting.base}) {lasting.what} {now}. Answer: {lasting.doing}.
In "^{act.who} {act.past} {act.what}", the subject is "{act.who}" and the verb is "{act.past}".
"{lasting.who} {lasting.be} {lasting.doing} {lasting.what}" is in the present continuous.
"{act.who} {act.have} {act.done} {act.what}" is in the present perfect.
"{act.who} had {act.done} {act.what}" is in the past perfect.
{lasting.who} {lasting.past} {lasting.what} {manner.adverb}.
"{manner.adjective}" is an adjective and "{manner.adverb}" is an adverb: {lasting.who} {lasting.be} {lasting.doing} \
{lasting.what} {manner.adverb}.
The adverb of "{manner.adjective}" is "{manner.adverb}", and that of "{odd_manner.adjective}" is "{odd_manner.adverb}".
There is {noun.a} {place}.
There are {number} {noun.many} {place}.
How many {noun.many} are there {place}? There are {number}.
The plural of "{noun.one}" is "{noun.many}": one {noun.one}, {number} {noun.many}.
The plural of "{odd_noun.one}" is "{odd_noun.many}", and the plural of "{noun.one}" is "{noun.many}".
We say "{noun.a}" but "{number} {noun.many}", and "{odd_noun.a}" but "{number} {odd_noun.many}".
{named.who} {named.have} {noun.a} and {number} {noun2.many}.
Is there {noun.a} {place}? No, but there is {noun2.a}.
There is not much {stuff} left, but there are still {number} {noun.many}.
How much {stuff} {someone.do} {someone.who} need? Only a little.
{someone.who} {someone.be} {trait.more} than {someone2.who}.
{someone.who} {someone.be} not as {trait.adjective} as {someone2.who}.
{someone.who} {someone.be} the {trait.most} of all; {someone2.who} {someone2.be} rather {trait.opposite}.
This {quality.noun} is {quality.more} than that one.
It is the {quality.most} {quality.noun} that {someone.who} {someone.have} ever come across.
{someone.who} {someone.have} never come across such {quality.a}.
The opposite of "{quality.adjective}" is "{quality.opposite}": the {quality.noun} is \
not {quality.adjective} but {quality.opposite}.
{quality.adjective}, {quality.more}, {quality.most}: this {quality.noun} is the {quality.most} of all.
"What {quality.a}!" said {someone.who}.
{someone.who} {someone.be} {feeling} today, but {someone2.who} {someone2.be} {trait.adjective} as always.
Where {someone.be} {someone.who}? ^{someone.he} {someone.be} {place}.
"""
"""See corpus.py. The clauses that can be asked for, and what else fills a slot, are at the end of it."""
